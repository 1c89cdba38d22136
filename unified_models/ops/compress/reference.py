"""One window's entry, before norm and rope, in the precision of its input."""

import torch
from torch import Tensor


def pool(values_PD: Tensor, gates_PD: Tensor) -> Tensor:
    return (torch.softmax(gates_PD, 0) * values_PD).sum(0)
