"""RMSNorm over the last dimension."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.operator import operator
from unified_models.ops.sums import row_mean

WIDEST = 8192
"""Values of the longest row that the kernel holds; torch norms longer ones on a GPU too."""


class _RMSNorm(torch.autograd.Function):
    """By kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, eps: float, dtype: Any) -> Tensor:
        from unified_models.ops.rms_norm import triton as kernels

        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        out: Tensor = kernels.rms_norm(x, weight, eps, dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from unified_models.ops.rms_norm.backward_triton import rms_norm_backward

        x, weight = ctx.saved_tensors
        dx, dweight = rms_norm_backward(grads[0], x, weight, ctx.eps)
        return dx, None if dweight is None else dweight.to(weight.dtype), None, None


@operator
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, float32 throughout and rounded once.

    x: [..., N]; weight: float32 [N], or None for the weightless form. Returns x's dtype, or `dtype`.
    """
    dtype = dtype or x.dtype
    if x.is_cuda and x.shape[-1] <= WIDEST:
        return apply(_RMSNorm, x, weight, eps, dtype)
    return _rms_norm(x, weight, eps, dtype)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    wide = x.float().contiguous()
    y = wide * torch.rsqrt(row_mean(wide.square()) + eps)
    if weight is not None:
        y = y * weight
    return y.to(dtype)
