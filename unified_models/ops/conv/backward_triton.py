"""The gradients of a convolution over a pack: x's by written adds; those of taps and bias by parts of the tokens, which
another kernel adds from the first to the last."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.split_triton import add_parts
from unified_models.ops.rows import lane_of, whole_rows

TOKENS, CHANNELS = 8, 128
STEPS = 16
"""Times TOKENS: tokens of a part at least."""
PARTS = 64
"""Programs that share out the tokens, at most: what they write stays bounded."""


@triton.jit
def _read_by(
    dy_ptr, sequence_ptr, u, s, c, T, dy_row, inside, behind, LANE: tl.constexpr
):  # fmt: skip
    """dy of the token `behind` places behind row u, [TOKENS, CHANNELS]; 0 where it is of another sequence than s."""
    t = u + behind
    same = tl.load(sequence_ptr + t, mask=t < T, other=-1) == s
    dy_at = dy_ptr + t[:, None] * (dy_row * LANE) + c[None, :]
    live = (same & (s >= 0))[:, None] & inside[None, :]
    return tl.load(dy_at, mask=live, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["T", "dy_row"])
def _conv_rows(
    dy_ptr, taps_ptr, sequence_ptr, dx_ptr, T, dy_row, C,
    LANE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """dx[u] = sum_k taps[k] dy[u + TAPS - 1 - k] over the tokens that read row u, k ascending."""
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    u = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    inside = c < C
    s = tl.load(sequence_ptr + u, mask=u < T, other=-1)
    dx = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for k in tl.static_range(TAPS):
        dy = _read_by(dy_ptr, sequence_ptr, u, s, c, T, dy_row, inside, TAPS - 1 - k, LANE)
        dx += tl.load(taps_ptr + c * TAPS + k, mask=inside, other=0.0)[None, :] * dy
    dx_at = dx_ptr + u[:, None] * C + c[None, :]
    tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=(u < T)[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["T", "steps", "x_row", "dy_row"])
def _conv_taps(
    dy_ptr, x_ptr, sequence_ptr, parts_ptr, T, steps, x_row, dy_row, C,
    LANE: tl.constexpr, TAPS: tl.constexpr, TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """parts[p, k] = sum_u x[u] dy[u + TAPS - 1 - k] of the rows u of part p; parts[p, TAPS] = sum_u dy[u]. Each has a
    program; those of a part stand side by side, since all read the same rows."""
    number, part = tl.program_id(0) % (TAPS + 1), (tl.program_id(0) // (TAPS + 1)).to(tl.int64)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    inside, behind = c < C, tl.maximum(TAPS - 1 - number, 0)
    total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    for step in range(steps):
        u = (part * steps + step) * TOKENS + tl.arange(0, TOKENS)
        s = tl.load(sequence_ptr + u, mask=u < T, other=-1)
        dy = _read_by(dy_ptr, sequence_ptr, u, s, c, T, dy_row, inside, behind, LANE)
        x_at = x_ptr + u[:, None] * (x_row * LANE) + c[None, :]
        known = (s >= 0)[:, None] & (c < tl.where(number < TAPS, C, 0))[None, :]
        x = tl.load(x_at, mask=known, other=0.0).to(tl.float32)
        total += tl.where(number < TAPS, x, 1.0) * dy
    at = parts_ptr + (part * (TAPS + 1) + number) * C + c
    tl.store(at, tl.sum(total, axis=0), mask=inside)


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
        wide, shape = triton.cdiv(C, CHANNELS), (lane, K, TOKENS, CHANNELS)
        _conv_rows[(triton.cdiv(T, TOKENS), wide)](
            dy, taps_CK.float().contiguous(), sequence_T, dx, T, dy_row, C, *shape, num_warps=4
        )
        _conv_taps[(parts * (K + 1), wide)](
            dy, x, sequence_T, made, T, steps, x_row, dy_row, C, *shape, num_warps=4
        )
        add_parts(made, summed, parts)
    return dx, summed[:K].T.contiguous(), summed[K]
