"""sqrt(softplus(x)) as torch has it."""

from torch import Tensor
from torch.nn import functional as F


def sqrt_softplus(x: Tensor) -> Tensor:
    return F.softplus(x).sqrt()


def route_weights(scores_TE: Tensor, ids_TK: Tensor, scaling: float) -> Tensor:
    chosen_TK = scores_TE.gather(-1, ids_TK)
    return chosen_TK * (scaling / chosen_TK.sum(-1, keepdim=True))
