"""RMSNorm over the last dimension."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator


@operator
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, *, dtype: torch.dtype | None = None
) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight, float32 throughout and rounded once.

    x: [..., N]; weight: float32 [N], or None for the weightless form. Returns x's dtype, or `dtype`.
    """
    wide = x.float().contiguous()  # a mean over strided memory sums in another order
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight
    return y.to(dtype or x.dtype)
