"""RMSNorm as written in Zhang and Sennrich 2019, eq. 4, in the dtype of its input."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight
