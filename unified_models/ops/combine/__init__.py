"""The experts' answers of a token, weighted and added."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator
from unified_models.ops.rerun import rerun


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
        from unified_models.ops.combine import triton as kernels

        out: Tensor = rerun(kernels.combine, _combine_sorted, y_PM, place_TK, gates_TK, dtype)
        return out
    return _combine_sorted(y_PM, place_TK, gates_TK, dtype)


def _combine_sorted(y_PM: Tensor, place_TK: Tensor, gates_TK: Tensor, dtype: torch.dtype) -> Tensor:
    return combine(y_PM[place_TK], gates_TK, dtype=dtype)
