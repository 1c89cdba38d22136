"""Router scores from router logits."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.operator import operator


class _SqrtSoftplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        soft = torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))
        y = soft.sqrt()
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        slope = 1 / (1 + torch.exp(-x))
        # Below about -104 softplus is exactly 0 in float32; its root's slope there is 0 in the limit.
        return grads[0] * torch.where(y > 0, slope / (2 * y), torch.zeros_like(y))


@operator
def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + e^x)) by log1p; x itself above 20. x: [..., E] float32 or float64."""
    return apply(_SqrtSoftplus, x)
