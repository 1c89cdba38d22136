"""Clamped SwiGLU (Shazeer 2020, eq. 6; DeepSeek-V4's limits) and squared ReLU, in the precision of their input."""

import torch
from torch import Tensor


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    if limit is not None:
        gate = torch.where(gate > limit, torch.full_like(gate, limit), gate)
        up = torch.where(up.abs() > limit, limit * up.sign(), up)
    return gate * torch.sigmoid(gate) * up


def relu2(x: Tensor) -> Tensor:
    return torch.where(x > 0, x * x, torch.zeros_like(x))
