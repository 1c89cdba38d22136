"""The gradients of a convolution over a pack in one pass: x's by written adds, those of taps and bias by parts of the
tokens, which a second kernel adds from the first to the last."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.split_triton import add_parts
from unified_models.ops.rows import lane_of, whole_rows

TOKENS, CHANNELS = 16, 128
STEPS = 8
"""Times TOKENS: tokens of a program at least."""
PARTS = 256
"""Programs that share out the tokens, at most: what they write stays bounded."""


@triton.jit(do_not_specialize=["T", "steps", "x_row", "dy_row"])
def _conv_backward(
    dy_ptr, x_ptr, taps_ptr, sequence_ptr, dx_ptr, parts_ptr, T, steps, x_row, dy_row, C,
    LANE: tl.constexpr, TAPS: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx[u] = sum_k taps[k] dy[u + TAPS - 1 - k] over the tokens that read row u; parts[p, k] = sum_u x[u] dy[...] of
    the rows u of program p, and parts[p, TAPS] = sum_u dy[u]."""
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    number = tl.arange(0, WIDE)
    inside = c < C
    total = tl.zeros((WIDE, CHANNELS), dtype=tl.float32)
    for step in range(steps):
        u = (tl.program_id(0) * steps + step).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
        s = tl.load(sequence_ptr + u, mask=u < T, other=-1)
        known = (s >= 0)[:, None] & inside[None, :]
        x_at = x_ptr + u[:, None] * (x_row * LANE) + c[None, :]
        x = tl.load(x_at, mask=known, other=0.0).to(tl.float32)
        dx = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
        for k in tl.static_range(TAPS):
            t = u + (TAPS - 1 - k)
            same = tl.load(sequence_ptr + t, mask=t < T, other=-1) == s
            dy_at = dy_ptr + t[:, None] * (dy_row * LANE) + c[None, :]
            dy = tl.load(dy_at, mask=same[:, None] & known, other=0.0).to(tl.float32)
            dx += tl.load(taps_ptr + c * TAPS + k, mask=inside, other=0.0)[None, :] * dy
            of_tap = tl.sum(x * dy, axis=0)
            total += tl.where(number[:, None] == k, of_tap[None, :], 0.0)
            if k == TAPS - 1:
                of_bias = tl.sum(dy, axis=0)
                total += tl.where(number[:, None] == TAPS, of_bias[None, :], 0.0)
        dx_at = dx_ptr + u[:, None] * C + c[None, :]
        tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=(u < T)[:, None] & inside[None, :])
    at = (tl.program_id(0).to(tl.int64) * (TAPS + 1) + number[:, None]) * C + c[None, :]
    tl.store(parts_ptr + at, total, mask=(number <= TAPS)[:, None] & inside[None, :])


def conv_backward(
    dy_TC: Tensor, x_TC: Tensor, taps_CK: Tensor, sequence_T: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dx [T, C] in x's dtype; dtaps [C, K] and dbias [C], float32.

    dy, x: bfloat16 or float32, rows any stride apart; taps: float32; sequence: of each token, int32, whose sequences
    lie whole and one after the other; -1: padding, whose dx is 0.
    """
    (T, C), K = x_TC.shape, taps_CK.shape[1]
    dx = torch.empty(T, C, dtype=x_TC.dtype, device=x_TC.device)
    steps = max(STEPS, triton.cdiv(triton.cdiv(T, PARTS), TOKENS))
    parts = triton.cdiv(T, steps * TOKENS)
    summed = torch.zeros(K + 1, C, dtype=torch.float32, device=x_TC.device)
    if dx.numel():
        lane = lane_of(C)
        (x, x_row), (dy, dy_row) = whole_rows(x_TC, lane), whole_rows(dy_TC, lane)
        made = torch.empty(parts, K + 1, C, dtype=torch.float32, device=x_TC.device)
        _conv_backward[(parts, triton.cdiv(C, CHANNELS))](
            dy, x, taps_CK.float().contiguous(), sequence_T, dx, made, T, steps, x_row, dy_row, C,
            lane, K, triton.next_power_of_2(K + 1), TOKENS, CHANNELS, num_warps=4,
        )  # fmt: skip
        add_parts(made, summed, parts)
    return dx, summed[:K].T.contiguous(), summed[K]
