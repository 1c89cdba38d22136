"""Attention over a list of rows for each token; a row is key and value of every head; a sink in the denominator."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.attend import arithmetic
from unified_models.ops.blocks import BLOCK
from unified_models.ops.operator import operator


class _AttendLatent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        rows_RD: Tensor,
        sinks_H: Tensor | None,
        index_TN: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_THD, rows_RD, sinks_H, index_TN)
        ctx.scale = scale
        return arithmetic.forward(q_THD, rows_RD, rows_RD, index_TN, sinks_H, scale).to(q_THD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, rows, sinks, index = ctx.saved_tensors
        dq, dkeys, dvalues, dsinks = arithmetic.backward(
            grads[0].float(), q, rows, rows, index, sinks, ctx.scale
        )
        return dq.to(q.dtype), (dkeys + dvalues).to(rows.dtype), dsinks, None, None


@operator
def attend_latent(
    q_THD: Tensor, rows_RD: Tensor, index_TN: Tensor, *, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """o_h = sum_n e^{s_hn - M} row_n / (sum_n e^{s_hn - M} + e^{sink_h - M}), s_hn = scale q_h . row_n, M = max_n s_hn.

    index_TN: rows of each token's list, N a multiple of 64, -1 = none; every list names at least one row. sinks_H:
    float32; e^{sink - M} may be inf, then the output is 0. float32 throughout, rounded once to q's dtype. The sums
    run in blocks of 64 list places, in list order (README.md).
    """
    if index_TN.shape[1] % BLOCK:
        raise ValueError(f"a list is a multiple of {BLOCK} places long, got {index_TN.shape[1]}")
    return apply(_AttendLatent, q_THD, rows_RD, sinks_H, index_TN, scale)
