"""Activations from safe elementwise operators.

torch's own sigmoid and silu differ in the last elements of a call or of a thread's share, so they are written out
over exp; their derivatives are written too, since exp overflows where the function itself is still finite.
"""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.operator import operator
from unified_models.ops.rerun import rerun


def by_kernel(x: Tensor) -> bool:
    """Whether a kernel computes a function of x alone: not in float64, which tests use."""
    return x.is_cuda and x.dtype == torch.float32


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if by_kernel(x):
            from unified_models.ops.activation import triton as kernels

            y = kernels.sigmoid(x)
        else:
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
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        if by_kernel(x):
            from unified_models.ops.activation import triton as kernels

            return kernels.silu(x, dtype)
        return (x / (1 + torch.exp(-x))).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if by_kernel(x):
            return derivatives("silu", grads[0], x)[0], None
        y = 1 / (1 + torch.exp(-x))
        return grads[0].to(x.dtype) * y * (1 + x * (1 - y)), None


def derivatives(kind: str, *args: Any) -> tuple[Tensor, Tensor]:
    """Of `kind`'s two inputs, by a kernel; of a single one, twice the same tensor."""
    from unified_models.ops.activation.backward_triton import derivative

    return derivative(kind, *args)


class _Relu2(torch.autograd.Function):
    """By kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from unified_models.ops.activation import triton as kernels

        ctx.save_for_backward(x)
        return kernels.relu2(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return derivatives("relu2", grads[0], *ctx.saved_tensors)[0]


class _Swiglu(torch.autograd.Function):
    """By kernels."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        from unified_models.ops.activation import triton as kernels

        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        return kernels.swiglu(gate, up, limit)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dgate, dup = derivatives("swiglu", grads[0], *ctx.saved_tensors, ctx.limit)
        return dgate, dup, None


class _Softplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if by_kernel(x):
            from unified_models.ops.activation import triton as kernels

            return kernels.softplus(x)
        return torch.where(x > 20, x, torch.log1p(torch.exp(x.clamp(max=20))))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        dx: Tensor = grads[0] / (1 + torch.exp(-x))
        return dx


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), x in float32 or float64."""
    return apply(_Sigmoid, x)


def silu(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x / (1 + exp(-x)), x in float32 or float64; rounded once where another `dtype` is asked for."""
    return apply(_Silu, x, dtype or x.dtype)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x) by log1p; x itself above 20. x in float32 or float64."""
    return apply(_Softplus, x)


@operator
def time_step(dt_TH: Tensor, bias_H: Tensor, limit: tuple[float, float]) -> Tensor:
    """softplus(dt + bias) within the limits, float32: how far a token moves a scan's state (Mamba-2, section 7)."""
    if dt_TH.is_cuda:
        from unified_models.ops.activation import triton as kernels

        out: Tensor = rerun(kernels.time_step, _time_step, dt_TH, bias_H, *limit)
        return out
    return _time_step(dt_TH, bias_H, *limit)


def _time_step(dt_TH: Tensor, bias_H: Tensor, low: float, high: float) -> Tensor:
    return softplus(dt_TH.float() + bias_H).clamp(low, high)


@operator
def relu2(x: Tensor) -> Tensor:
    """max(x, 0)^2 in float32, one rounding to x's dtype (So et al. 2021, Primer)."""
    if x.is_cuda:
        return apply(_Relu2, x)
    return _relu2(x)


def _relu2(x: Tensor) -> Tensor:
    return x.float().relu().square().to(x.dtype)


@operator
def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """silu(min(gate, limit)) * clamp(up, -limit, limit): float32, one rounding to gate's dtype.

    gate, up: [..., F]. The gate is clamped above only; at equality the gradient passes.
    """
    if gate.is_cuda:
        return apply(_Swiglu, gate, up, limit)
    return _swiglu(gate, up, limit)


def _swiglu(gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
    wide, other = gate.float(), up.float()
    if limit is not None:
        wide, other = wide.clamp(max=limit), other.clamp(-limit, limit)
    return (silu(wide) * other).to(gate.dtype)
