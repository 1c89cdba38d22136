"""Elementwise functions: float32 arithmetic, one rounding, read where the rows lie. An element's bits are its own, so
tiles and alignment are free."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rows import rows_of

BLOCK = 1024
"""Elements of a program."""


@triton.jit
def _sigmoid(x):
    return 1 / (1 + tl.exp(-x))


@triton.jit
def _softplus(x):
    """log1p(e^x), and x above 20. log(u) z / (u - 1) with u = 1 + z is log1p(z) to the last bits (Kahan), z where u is
    1."""
    z = tl.exp(tl.where(x > 20, 20.0, x))
    u = 1 + z
    log1p = tl.where(u == 1, z, tl.log(u) * (z / tl.where(u == 1, 1.0, u - 1)))
    return tl.where(x > 20, x, log1p)


@triton.jit(do_not_specialize=["R"])
def _each(
    x_ptr, up_ptr, out_ptr, R, N, stride_x, stride_up, limit, low,
    KIND: tl.constexpr, LIMITED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out[r, n] = KIND(x[r, n]), and of up[r, n] for swiglu. Clamps are written so that NaN passes."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < R) & (n[None, :] < N)
    at = r[:, None] * stride_x + n[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    if KIND == "relu2":
        kept = tl.where(x < 0, 0.0, x)
        y = kept * kept
    elif KIND == "sigmoid":
        y = _sigmoid(x)
    elif KIND == "softplus":
        y = _softplus(x)
    elif KIND == "time_step":
        up = tl.load(up_ptr + r[:, None] * stride_up + n[None, :], mask=inside, other=0.0)
        y = _softplus(x + up)
        y = tl.where(y > limit, limit, tl.where(y < low, low, y))
    elif KIND == "sqrt_softplus":
        y = tl.sqrt_rn(_softplus(x))
    else:
        if LIMITED:
            x = tl.where(x > limit, limit, x)
        y = x / (1 + tl.exp(-x))
    if KIND == "swiglu":
        at = r[:, None] * stride_up + n[None, :]
        up = tl.load(up_ptr + at, mask=inside, other=0.0).to(tl.float32)
        if LIMITED:
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = y * up
    at = r[:, None] * N + n[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=inside)


def each(
    kind: str,
    x: Tensor,
    up: Tensor | None,
    limit: float | None,
    dtype: torch.dtype,
    low: float = 0.0,
) -> Tensor:
    """kind(x) in `dtype`, contiguous. x, up: [..., N], rows any stride apart."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    x = rows_of(x if x.dim() else x[None])
    other = x if up is None else rows_of(up)
    R, N = x.shape
    columns = min(max(triton.next_power_of_2(N), 16), BLOCK)
    rows = BLOCK // columns
    _each[(triton.cdiv(R, rows), triton.cdiv(N, columns))](
        x, other, out, R, N, x.stride(0), other.stride(0), 0.0 if limit is None else limit, low,
        kind, limit is not None, rows, columns, num_warps=4,
    )  # fmt: skip
    return out


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), float32."""
    return each("sigmoid", x, None, None, torch.float32)


def silu(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x / (1 + exp(-x)), rounded to `dtype`."""
    return each("silu", x, None, None, dtype)


def softplus(x: Tensor) -> Tensor:
    """log1p(exp(x)), float32; x itself above 20."""
    return each("softplus", x, None, None, torch.float32)


def sqrt_softplus(x: Tensor) -> Tensor:
    """The root of softplus(x), float32."""
    return each("sqrt_softplus", x, None, None, torch.float32)


def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 in x's dtype."""
    return each("relu2", x, None, None, x.dtype)


def swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit) in gate's dtype."""
    return each("swiglu", gate, up, limit, gate.dtype)


def time_step(x: Tensor, bias: Tensor, low: float, high: float) -> Tensor:
    """softplus(x + bias) within [low, high], float32. x: [T, H], rows any stride apart; bias: float32 [H]."""
    return each("time_step", x, bias.expand(x.shape), high, torch.float32, low)
