"""RMSNorm over the last dimension."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator
from unified_models.ops.rerun import rerun
from unified_models.ops.sums import row_mean

WIDEST = 8192
"""Values of the longest row that the kernel holds; torch norms longer ones on a GPU too."""


@operator
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, float32 throughout and rounded once.

    x: [..., N]; weight: float32 [N], or None for the weightless form. Returns x's dtype, or `dtype`.
    """
    dtype = dtype or x.dtype
    if x.is_cuda and x.shape[-1] <= WIDEST:
        from unified_models.ops.rms_norm import triton as kernels

        out: Tensor = rerun(kernels.rms_norm, _rms_norm, x, weight, eps, dtype)
        return out
    return _rms_norm(x, weight, eps, dtype)


def _rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    wide = x.float().contiguous()
    y = wide * torch.rsqrt(row_mean(wide.square()) + eps)
    if weight is not None:
        y = y * weight
    return y.to(dtype)
