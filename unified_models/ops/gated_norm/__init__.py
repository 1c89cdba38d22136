"""RMSNorm over groups of channels, behind a gate."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.activation import silu
from unified_models.ops.operator import operator
from unified_models.ops.rms_norm import WIDEST
from unified_models.ops.rounded import rounded
from unified_models.ops.sums import row_mean


class _GatedNorm(torch.autograd.Function):
    """By kernels."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
    ) -> Tensor:
        from unified_models.ops.gated_norm import triton as kernels

        ctx.save_for_backward(x, gate, weight)
        ctx.eps, ctx.groups = eps, groups
        out: Tensor = kernels.gated_norm(x, gate, weight, eps, groups)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from unified_models.ops.gated_norm.backward_triton import gated_norm_backward

        x, gate, weight = ctx.saved_tensors
        dx, dgate, dweight = gated_norm_backward(grads[0], x, gate, weight, ctx.eps, ctx.groups)
        return dx, dgate, dweight.to(weight.dtype), None, None


@operator
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int) -> Tensor:
    """v = x * silu(gate); v * rsqrt(mean(v^2 within its group) + eps), rounded to x's dtype, then * weight, rounded.

    x, gate: [..., N], N a multiple of groups (ValueError otherwise); weight: float32 [N]. float32 but for the two
    roundings, which is what samplers do.
    """
    if x.shape[-1] % groups:
        raise ValueError(f"{x.shape[-1]} channels do not divide into {groups} groups")
    if x.is_cuda and x.shape[-1] // groups <= WIDEST:
        return apply(_GatedNorm, x, gate, weight, eps, groups)
    return _gated_norm(x, gate, weight, eps, groups)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    v = (x.float() * silu(gate.float())).contiguous().unflatten(-1, (groups, -1))
    y = v * torch.rsqrt(row_mean(v.square()) + eps)
    return (weight * rounded(y.flatten(-2), x.dtype)).to(x.dtype)
