"""Router scores from router logits, and the weights of the experts that were chosen."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.activation import by_kernel
from unified_models.ops.operator import operator
from unified_models.ops.rerun import rerun
from unified_models.ops.sums import row_sum

TINY = 1e-20
"""Added to the sum of a token's scores."""


class _SqrtSoftplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if by_kernel(x):
            from unified_models.ops.activation import triton as kernels

            y = kernels.sqrt_softplus(x)
        else:
            y = torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20)))).sqrt()
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


@operator
def route_weights(scores_TE: Tensor, ids_TK: Tensor, scaling: float) -> Tensor:
    """The scores of the chosen experts over their sum, times `scaling`: float32 [T, K]."""
    if scores_TE.is_cuda:
        from unified_models.ops.router_scores import triton as kernels

        out: Tensor = rerun(kernels.route_weights, _route_weights, scores_TE, ids_TK, scaling)
        return out
    return _route_weights(scores_TE, ids_TK, scaling)


def _route_weights(scores_TE: Tensor, ids_TK: Tensor, scaling: float) -> Tensor:
    chosen_TK = scores_TE.gather(-1, ids_TK)
    return chosen_TK / (row_sum(chosen_TK) + TINY) * scaling
