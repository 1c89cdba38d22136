"""x @ w.T for a weight in any format, row-invariant, with the straight-through derivative."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.linear import arithmetic, gradients
from unified_models.ops.operator import operator
from unified_models.weight import Reading


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor | None,
        reading: Reading,
        rows: arithmetic.Input,
        dtype: Any,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.reading = reading
        return arithmetic.products(rows, reading, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        reading: Reading = ctx.reading
        reading.check()
        (x,) = ctx.saved_tensors
        dx = dw = None
        if ctx.needs_input_grad[0]:
            dx = gradients.dgrad(grads[0], reading, x.dtype)
        if ctx.needs_input_grad[1]:
            dw = gradients.wgrad(grads[0], x, reading)
        return dx, dw, None, None, None


@operator
def linear(x: Tensor, *readings: Reading, dtype: torch.dtype | None = None) -> tuple[Tensor, ...]:
    """x @ w.T for each weight.

    x: [T, K], or [T, groups, K] for weights of groups (of one group: either); weights [N, K], or [groups * N, K];
    ValueError otherwise. y: [T, N], or [T, groups, N].
    float32 accumulation in the order that README.md fixes; one rounding to the format's activation dtype, or to
    `dtype`.
    Backward: dX = dY @ dequantised w; dW = dY.T @ x as the product saw it, to the master: see `gradients`.
    """
    one_group = x.dim() == 3 and x.shape[1] == 1 and all(r.weight.groups == 1 for r in readings)
    if one_group:
        x = x.squeeze(1)
    for reading in readings:
        check(x, reading)
    outs = []
    for reading, rows in zip(readings, arithmetic.inputs(x, readings, dtype=dtype), strict=True):
        out_dtype = dtype or reading.format.activation
        y = apply(_Linear, x, reading.master, reading, rows, out_dtype)
        outs.append(y.unsqueeze(1) if one_group else y)
    return tuple(outs)


def check(x: Tensor, reading: Reading) -> None:
    """Refuse rows that are not of the weight's shape: a product would drop or misread what is over."""
    groups, label = reading.weight.groups, reading.weight.label
    if len(reading.shape) != 2:
        raise ValueError(
            f"{label}: a linear takes a matrix, got a weight of shape {tuple(reading.shape)}"
        )
    K = reading.shape[-1]
    if x.shape[-1] != K:
        raise ValueError(f"{label}: x has {x.shape[-1]} channels, the weight {K}")
    wanted = (groups, K) if groups > 1 else (K,)
    if x.shape[1:] != wanted:
        raise ValueError(
            f"{label}: x has rows of shape {tuple(x.shape[1:])}, the weight takes {wanted}"
        )
