"""A rounding within an operator, with the straight-through derivative."""

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.formats.activations import RoundTrip


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 x with the values that it has in `dtype`; its gradient stays in float32."""
    if dtype == torch.float32:
        return x
    return apply(RoundTrip, x, x.detach().to(dtype).float())
