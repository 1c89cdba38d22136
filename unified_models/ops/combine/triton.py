"""The experts' answers of a token, read where they lie among the sorted rows."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rows import rows_of

BLOCK = 1024
"""Channels of a program."""


@triton.jit
def _combine(
    y_ptr, place_ptr, gates_ptr, out_ptr, M, stride, K: tl.constexpr, COLUMNS: tl.constexpr
):
    """out[t] = gates[t, 0] y[place[t, 0]] + ..., in slot order; a row of y begins every `stride` elements."""
    t = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(place_ptr + t * K)
    y = tl.load(y_ptr + first * stride + m, mask=m < M, other=0.0).to(tl.float32)
    total = y * tl.load(gates_ptr + t * K)
    for k in tl.static_range(1, K):
        place = tl.load(place_ptr + t * K + k)
        y = tl.load(y_ptr + place * stride + m, mask=m < M, other=0.0).to(tl.float32)
        total += y * tl.load(gates_ptr + t * K + k)
    tl.store(out_ptr + t * M + m, total.to(out_ptr.dtype.element_ty), mask=m < M)


def combine(y_PM: Tensor, place_TK: Tensor, gates_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """[T, M] in `dtype`. y: bfloat16 or float32; place: int64, rows of y; gates: float32."""
    (T, K), M = place_TK.shape, y_PM.shape[1]
    out = torch.empty(T, M, dtype=dtype, device=y_PM.device)
    if out.numel() == 0:
        return out
    y_PM = rows_of(y_PM)
    columns = min(max(triton.next_power_of_2(M), 64), BLOCK)
    # Without fused adds each product is rounded, as torch rounds it.
    _combine[(T, triton.cdiv(M, columns))](
        y_PM, place_TK.contiguous(), gates_TK.float().contiguous(), out, M, y_PM.stride(0),
        K, columns, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return out


@triton.jit
def _spread(x_ptr, order_ptr, out_ptr, M, stride, K: tl.constexpr, COLUMNS: tl.constexpr):
    """out[p] = x[order[p] // K]; a row of x begins every `stride` elements."""
    p = tl.program_id(0).to(tl.int64)
    m = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = x_ptr + tl.load(order_ptr + p) // K * stride
    tl.store(out_ptr + p * M + m, tl.load(row + m, mask=m < M, other=0.0), mask=m < M)


def spread(x_TM: Tensor, order_P: Tensor, K: int) -> Tensor:
    """x[order // K], [P, M]. order: int64, 0 and above."""
    P, M = len(order_P), x_TM.shape[1]
    out = torch.empty(P, M, dtype=x_TM.dtype, device=x_TM.device)
    if out.numel():
        x_TM = rows_of(x_TM)
        columns = min(max(triton.next_power_of_2(M), 64), BLOCK)
        _spread[(P, triton.cdiv(M, columns))](
            x_TM, order_P, out, M, x_TM.stride(0), K, columns, num_warps=4
        )
    return out
