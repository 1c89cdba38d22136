"""sqrt(softplus(x)) as torch has it."""

from torch import Tensor
from torch.nn import functional as F


def sqrt_softplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()
