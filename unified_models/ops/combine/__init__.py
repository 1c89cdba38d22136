"""The experts' answers of a token, weighted and added."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.operator import operator


class _CombineSorted(torch.autograd.Function):
    """By kernels."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, place: Tensor, gates: Tensor, dtype: torch.dtype) -> Tensor:
        from unified_models.ops.combine import triton as kernels

        ctx.save_for_backward(y, place, gates)
        out: Tensor = kernels.combine(y, place, gates, dtype)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from unified_models.ops.combine.backward_triton import combine_backward

        y, place, gates = ctx.saved_tensors
        dy, dgates = combine_backward(grads[0], y, place, gates)
        return dy, None, dgates.to(gates.dtype), None


class _Spread(torch.autograd.Function):
    """x[order // K]; the gradient adds a token's rows where `place` says they stand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        from unified_models.ops.combine import triton as kernels

        ctx.save_for_backward(place)
        out: Tensor = kernels.spread(x, order, place.shape[1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from unified_models.ops.combine import triton as kernels

        (place,) = ctx.saved_tensors
        ones = torch.ones(place.shape, dtype=torch.float32, device=place.device)
        return kernels.combine(grads[0], place, ones, grads[0].dtype), None, None


@operator
def spread(x_TM: Tensor, order_P: Tensor, place_TK: Tensor) -> Tensor:
    """A token's row for each of its experts, [P, M], sorted by expert as `sort` gives order and place.

    Backward: on CUDA a token's rows are added in float32, in slot order, and rounded once."""
    if x_TM.is_cuda:
        return apply(_Spread, x_TM, order_P, place_TK)
    return x_TM[order_P // place_TK.shape[1]]


@operator
def combine(y_TKM: Tensor, gates_TK: Tensor, *, dtype: torch.dtype) -> Tensor:
    """sum_k gates[k] * y[k]: float32, written adds in slot order, rounded once to `dtype`."""
    total = y_TKM[:, 0].float() * gates_TK[:, 0, None]
    for k in range(1, y_TKM.shape[1]):
        total = total + y_TKM[:, k].float() * gates_TK[:, k, None]
    return total.to(dtype)


@operator
def combine_sorted(y_PM: Tensor, place_TK: Tensor, gates_TK: Tensor, dtype: torch.dtype) -> Tensor:
    """`combine` of y[place[t, k]]: answers of rows sorted by expert, place_TK as `sort` gives it. [T, M]."""
    if y_PM.is_cuda:
        return apply(_CombineSorted, y_PM, place_TK, gates_TK, dtype)
    return _combine_sorted(y_PM, place_TK, gates_TK, dtype)


def _combine_sorted(y_PM: Tensor, place_TK: Tensor, gates_TK: Tensor, dtype: torch.dtype) -> Tensor:
    return combine(y_PM[place_TK], gates_TK, dtype=dtype)
