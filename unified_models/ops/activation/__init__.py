"""Activations from safe elementwise operators.

torch's own sigmoid and silu differ in the last elements of a call or of a thread's share, so they are written out
over exp; their derivatives are written too, since exp overflows where the function itself is still finite.
"""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.operator import operator


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = 1 / (1 + torch.exp(-x))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        dx: Tensor = grads[0] * y * (1 - y)
        return dx


class _Silu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x / (1 + torch.exp(-x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        y = 1 / (1 + torch.exp(-x))
        dx: Tensor = grads[0] * y * (1 + x * (1 - y))
        return dx


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx: Tensor = grads[0] / (1 + torch.exp(-x))
        return dx


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), x in float32 or float64."""
    return apply(_Sigmoid, x)


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x)), x in float32 or float64."""
    return apply(_Silu, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) by log1p; x itself above 20. x in float32 or float64."""
    return apply(_Softplus, x)


@operator
def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 in float32, one rounding to x's dtype (So et al. 2021, Primer)."""
    return x.float().relu().square().to(x.dtype)


@operator
def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): float32, one rounding to gate's dtype.

    gate, up: [..., F]. The gate is clamped above only; at equality the gradient passes.
    """
    wide, other = gate.float(), up.float()
    if limit is not None:
        wide, other = wide.clamp(max=limit), other.clamp(-limit, limit)
    return (silu(wide) * other).to(gate.dtype)
