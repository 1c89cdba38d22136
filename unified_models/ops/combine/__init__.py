"""The experts' answers of a token, weighted and added."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator


@operator
def combine(y_TKM: Tensor, gates_TK: Tensor, *, dtype: torch.dtype) -> Tensor:
    """sum_k gates[k] * y[k]: float32, written adds in slot order, rounded once to `dtype`."""
    total = y_TKM[:, 0].float() * gates_TK[:, 0, None]
    for k in range(1, y_TKM.shape[1]):
        total = total + y_TKM[:, k].float() * gates_TK[:, k, None]
    return total.to(dtype)
