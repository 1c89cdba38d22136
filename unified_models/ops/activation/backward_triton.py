"""Derivatives of elementwise functions: float32 arithmetic, one rounding to each input's dtype."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rows import rows_of

BLOCK = 1024
"""Elements of a program."""


@triton.jit(do_not_specialize=["R"])
def _derivative(
    dy_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, R, N, stride_dy, stride_x, stride_up, limit,
    KIND: tl.constexpr, LIMITED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx = dy KIND'(x), and both of swiglu. At equality with a limit the gradient passes."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < R) & (n[None, :] < N)
    at, r = n[None, :], r[:, None]
    dy = tl.load(dy_ptr + r * stride_dy + at, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + r * stride_x + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "relu2":
        dx = dy * (2 * tl.where(x < 0, 0.0, x))
    else:
        z = x
        if LIMITED:
            z = tl.where(x > limit, limit, x)
        sigmoid = 1 / (1 + tl.exp(-z))
        slope = sigmoid * (1 + z * (1 - sigmoid))
        if LIMITED:
            slope = tl.where(x > limit, 0.0, slope)
        dx = dy * slope
        if KIND == "swiglu":
            up = tl.load(up_ptr + r * stride_up + at, mask=inside, other=0.0).to(tl.float32)
            dup = dy * (z * sigmoid)
            if LIMITED:
                dup = tl.where((up > limit) | (up < -limit), 0.0, dup)
                up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
            dx = dx * up
            tl.store(dup_ptr + r * N + at, dup.to(dup_ptr.dtype.element_ty), mask=inside)
    tl.store(dx_ptr + r * N + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)


def derivative(
    kind: str, dy: Tensor, x: Tensor, up: Tensor | None = None, limit: float | None = None
) -> tuple[Tensor, Tensor]:
    """dx, and dup of swiglu (else dx again), in their inputs' dtypes. kind: relu2, silu or swiglu; dy, x, up: [..., N],
    bfloat16 or float32, rows any stride apart."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dup = dx if up is None else torch.empty(up.shape, dtype=up.dtype, device=x.device)
    if dx.numel() == 0:
        return dx, dup
    dy, rows_x = (rows_of(t if t.dim() else t[None]) for t in (dy, x))
    rows_up = rows_x if up is None else rows_of(up)
    R, N = rows_x.shape
    columns = min(max(triton.next_power_of_2(N), 16), BLOCK)
    rows = BLOCK // columns
    _derivative[(triton.cdiv(R, rows), triton.cdiv(N, columns))](
        dy, rows_x, rows_up, dx, dup, R, N, dy.stride(0), rows_x.stride(0), rows_up.stride(0),
        0.0 if limit is None else limit, kind, limit is not None, rows, columns, num_warps=4,
    )  # fmt: skip
    return dx, dup
