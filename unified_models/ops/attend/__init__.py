"""Attention over a list of key and value rows for each token, query heads in groups that share a key head (GQA)."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.attend import arithmetic
from unified_models.ops.blocks import BLOCK
from unified_models.ops.operator import operator


class _Attend(torch.autograd.Function):
    """One key head and its query heads."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_RD: Tensor, v_RD: Tensor, index_TN: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q_THD, k_RD, v_RD, index_TN)
        ctx.scale = scale
        return arithmetic.forward(q_THD, k_RD, v_RD, index_TN, None, scale).to(q_THD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, index = ctx.saved_tensors
        dq, dk, dv, _ = arithmetic.backward(grads[0].float(), q, k, v, index, None, ctx.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


@operator
def attend(
    q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, index_TN: Tensor, *, scale: float
) -> Tensor:
    """o_h = sum_n e^{s_hn - M} v_n / sum_n e^{s_hn - M}, s_hn = scale q_h . k_n, M = max_n s_hn, of key head h G / H.

    index_TN: rows of each token's list, N a multiple of 64, -1 = none; every list names at least one row. H is a
    multiple of G; ValueError otherwise. float32 throughout, rounded once to q's dtype. The sums run in blocks of 64
    list places, in list order (README.md).
    """
    if index_TN.shape[1] % BLOCK:
        raise ValueError(f"a list is a multiple of {BLOCK} places long, got {index_TN.shape[1]}")
    H, G = q_THD.shape[1], k_RGD.shape[1]
    if H % G:
        raise ValueError(f"{H} query heads do not divide over {G} key heads")
    heads = q_THD.unflatten(1, (G, H // G))
    outs = [
        apply(_Attend, heads[:, g], k_RGD[:, g], v_RGD[:, g], index_TN, scale) for g in range(G)
    ]
    return torch.cat(outs, 1)
