"""A loop over experts, each a plain matrix product."""

from collections.abc import Sequence

import torch
from torch import Tensor


def grouped_linear(x_PK: Tensor, counts_E: Sequence[int], w_ENK: Tensor) -> Tensor:
    parts = x_PK.split(list(counts_E))
    return torch.cat([part @ w.T for part, w in zip(parts, w_ENK, strict=True)])
