"""Gated RMSNorm group by group (Mamba-2's norm before its last projection), in the precision of its input."""

import torch
from torch import Tensor


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    v = x * gate * torch.sigmoid(gate)
    parts = [p / torch.sqrt((p * p).mean(-1, keepdim=True) + eps) for p in v.chunk(groups, -1)]
    return torch.cat(parts, -1) * weight
