"""The weighted sum as an einsum."""

import torch
from torch import Tensor


def combine(y_TKM: Tensor, gates_TK: Tensor) -> Tensor:
    return torch.einsum("tk,tkm->tm", gates_TK, y_TKM)
