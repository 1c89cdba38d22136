"""Sinkhorn-Knopp: a small positive matrix of each token, normalised by rows and columns in turn."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.sums import ordered_sum


def softmax_rows(logits_TXX: Tensor) -> Tensor:
    """Each row's softmax; the row's maximum is a constant to the gradient."""
    e = torch.exp(logits_TXX - logits_TXX.amax(-1, keepdim=True).detach())
    return e / ordered_sum(e, -1)[..., None]


def normalized(start_TXX: Tensor, iterations: int, eps: float) -> Tensor:
    """Columns, then (rows, columns) iterations - 1 times, each divided by its sum + eps."""
    b = start_TXX + eps
    for dim in [-2, *[-1, -2] * (iterations - 1)]:
        b = b / (ordered_sum(b, dim).unsqueeze(dim) + eps)
    return b


def normalized_in_place(start_TXX: Tensor, iterations: int, eps: float) -> Tensor:
    """`normalized`, the same operations in the same order on planes of tokens: a third of the calls."""
    b_XXT = (start_TXX + eps).permute(1, 2, 0).contiguous()
    sums_XT = torch.empty_like(b_XXT[0])
    lines = {dim: b_XXT.unbind(0 if dim == -2 else 1) for dim in (-1, -2)}
    spread = {-1: sums_XT[:, None], -2: sums_XT[None]}
    for dim in [-2, *[-1, -2] * (iterations - 1)]:
        first, *rest = lines[dim]
        sums_XT.copy_(first)
        for line in rest:
            sums_XT.add_(line)
        b_XXT.div_(spread[dim] if eps == 0 else spread[dim].add_(eps))
    return b_XXT.permute(2, 0, 1).contiguous()


class _Normalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, start_TXX: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(start_TXX)
        ctx.iterations, ctx.eps = iterations, eps
        return normalized_in_place(start_TXX, iterations, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        with torch.enable_grad():
            start = ctx.saved_tensors[0].detach().requires_grad_()
            end = normalized(start, ctx.iterations, ctx.eps)
        return torch.autograd.grad(end, start, grads[0])[0], None, None


def sinkhorn(logits_TXX: Tensor, iterations: int, eps: float) -> Tensor:
    """A matrix with unit column sums and nearly unit row sums, in the dtype of the logits.

    softmax of each row, + eps; columns divided by their sum + eps; then rows and columns, iterations - 1 times.
    Backward runs the iterations again; nothing but the softmax is saved.
    """
    return apply(_Normalized, softmax_rows(logits_TXX), iterations, eps)
