"""The gradients of RMSNorm in one pass over memory; the weight's by parts of the rows, which a second kernel adds from
the first to the last."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.split_triton import add_parts
from unified_models.ops.rms_norm.triton import tile_of
from unified_models.ops.rows import aligned, lane_of, whole_rows

PARTS = 1024
"""Programs that share out the rows, at most: what they write stays bounded."""


@triton.jit(do_not_specialize=["R", "steps", "steps_dy", "steps_x"])
def _rms_norm_backward(
    dy_ptr, x_ptr, weight_ptr, dx_ptr, parts_ptr, R, steps, steps_dy, steps_x, eps,
    N: tl.constexpr, LANE: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of r = rsqrt(mean(x^2) + eps), y = x r and g = dy weight: dx = r (g - y mean(g y)); parts[p] = sum of dy y."""
    n = tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    if WEIGHTED:
        weight = tl.load(weight_ptr + n, mask=n < N, other=0.0)[None, :]
    for step in range(steps):
        r = (tl.program_id(0) * steps + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (r[:, None] < R) & (n[None, :] < N)
        at, r = n[None, :], r[:, None]
        x = tl.load(x_ptr + r * (steps_x * LANE) + at, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(dy_ptr + r * (steps_dy * LANE) + at, mask=inside, other=0.0).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(x * x, axis=1) / N + eps)[:, None]
        y = x * inverse
        if WEIGHTED:
            total += tl.sum(g * y, axis=0)
            g = g * weight
        dx = inverse * (g - y * (tl.sum(g * y, axis=1) / N)[:, None])
        tl.store(dx_ptr + r * N + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if WEIGHTED:
        tl.store(parts_ptr + tl.program_id(0).to(tl.int64) * N + n, total, mask=n < N)


def share(R: int, rows: int) -> tuple[int, int]:
    """Steps of so many rows that a program takes, and how many programs share out R rows."""
    steps = triton.cdiv(triton.cdiv(R, rows), PARTS)
    return steps, triton.cdiv(triton.cdiv(R, rows), max(steps, 1))


def rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor | None]:
    """dx in x's dtype and dweight, float32 [N], or None. dy, x: [..., N] in bfloat16 or float32."""
    N = x.shape[-1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dweight = None if weight is None else torch.zeros(N, dtype=torch.float32, device=x.device)
    if dx.numel() == 0:
        return dx, dweight
    lane, (rows, width, warps) = lane_of(N), tile_of(N)
    (dys, steps_dy), (xs, steps_x) = whole_rows(dy, lane), whole_rows(x, lane)
    R = len(xs)
    steps, parts = share(R, rows)
    made = xs
    if weight is not None:
        made = torch.empty(parts, N, dtype=torch.float32, device=x.device)
    _rms_norm_backward[(parts,)](
        dys, xs, xs if weight is None else aligned(weight.float()), dx, made,
        R, steps, steps_dy, steps_x, eps,
        N, lane, weight is not None, rows, width, num_warps=warps,
    )  # fmt: skip
    if dweight is not None:
        add_parts(made, dweight, parts)
    return dx, dweight
