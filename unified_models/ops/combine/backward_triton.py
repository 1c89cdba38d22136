"""The gradients of the experts' answers and of their weights: one program a token, which reads each answer once."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rows import rows_of

BLOCK = 1024
"""Channels that a program has at a time."""


@triton.jit
def _combine_backward(
    dout_ptr, y_ptr, place_ptr, gates_ptr, dy_ptr, dgates_ptr, M, stride_dout, stride_y,
    K: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dy[place[t, k]] = gates[t, k] dout[t]; dgates[t, k] = sum_m dout[t, m] y[place[t, k], m]."""
    t = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, COLUMNS)
    for k in tl.static_range(K):
        place = tl.load(place_ptr + t * K + k)
        gate = tl.load(gates_ptr + t * K + k)
        total = tl.zeros((COLUMNS,), dtype=tl.float32)
        for start in range(0, M, COLUMNS):
            inside = m < M - start
            dout = tl.load(dout_ptr + t * stride_dout + start + m, mask=inside, other=0.0)
            y = tl.load(y_ptr + place * stride_y + start + m, mask=inside, other=0.0)
            dout = dout.to(tl.float32)
            total += dout * y.to(tl.float32)
            dy = (gate * dout).to(dy_ptr.dtype.element_ty)
            tl.store(dy_ptr + place * M + start + m, dy, mask=inside)
        tl.store(dgates_ptr + t * K + k, tl.sum(total, axis=0))  # one tree


def combine_backward(
    dout_TM: Tensor, y_PM: Tensor, place_TK: Tensor, gates_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """dy [P, M] in y's dtype, 0 in rows that no pair names, and dgates [T, K], float32. place: int64, each row of y
    once at most."""
    (T, K), (P, M) = place_TK.shape, y_PM.shape
    made = torch.empty if P == T * K else torch.zeros
    dy = made(P, M, dtype=y_PM.dtype, device=y_PM.device)
    dgates = torch.zeros(T, K, dtype=torch.float32, device=y_PM.device)
    if T * K * M == 0:
        return dy, dgates
    dout, y = rows_of(dout_TM), rows_of(y_PM)
    columns = min(max(triton.next_power_of_2(M), 64), BLOCK)
    _combine_backward[(T,)](
        dout, y, place_TK.contiguous(), gates_TK.float().contiguous(), dy, dgates,
        M, dout.stride(0), y.stride(0), K, columns, num_warps=4,
    )  # fmt: skip
    return dy, dgates
