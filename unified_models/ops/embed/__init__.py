"""Rows of an embedding table."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.operator import operator
from unified_models.ops.sums import add_rows_
from unified_models.weight import Reading


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids_T: Tensor, master: Tensor | None, reading: Reading) -> Tensor:
        ctx.save_for_backward(ids_T)
        ctx.reading = reading
        return reading.packed["values"][ids_T]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, None]:
        ctx.reading.check()
        (ids_T,) = ctx.saved_tensors
        dw = torch.zeros(ctx.reading.shape, dtype=torch.float32, device=grads[0].device)
        add_rows_(dw, ids_T, grads[0].float())
        return None, dw.to(ctx.reading.grad_dtype), None


@operator
def embed(ids_T: Tensor, reading: Reading) -> Tensor:
    """table[ids], in the format's dtype. ids_T: int64 in [0, V); the table in a plain format, [V, M].

    Backward: the gradients of equal ids are added in row order, float32.
    """
    if "values" not in reading.packed:
        name, label = reading.format.name, reading.weight.label
        raise ValueError(f"{label}: an embedding table is bfloat16 or float32, not {name}")
    return apply(_Embed, ids_T, reading.master, reading)
