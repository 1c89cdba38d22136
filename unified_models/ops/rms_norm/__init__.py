"""RMSNorm over the last dimension."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator
from unified_models.ops.sums import row_mean


@operator
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, float32 throughout and rounded once.

    x: [..., N]; weight: float32 [N], or None for the weightless form. Returns x's dtype, or `dtype`.
    """
    wide = x.float().contiguous()
    y = wide * torch.rsqrt(row_mean(wide.square()) + eps)
    if weight is not None:
        y = y * weight
    return y.to(dtype or x.dtype)
