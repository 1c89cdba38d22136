"""Clamped SwiGLU (Shazeer 2020, eq. 6; DeepSeek-V4's limits), in the precision of its input."""

import torch
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    if limit is not None:
        gate = torch.where(gate > limit, torch.full_like(gate, limit), gate)
        up = torch.where(up.abs() > limit, limit * up.sign(), up)
    return gate * torch.sigmoid(gate) * up
