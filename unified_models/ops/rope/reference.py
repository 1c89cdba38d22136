"""Rotary embedding as multiplication by e^{i t f}, in the precision of its input."""

import torch
from torch import Tensor


def rope(x: Tensor, positions_T: Tensor, frequencies: Tensor, *, inverse: bool = False) -> Tensor:
    dim = 2 * len(frequencies)
    angles = positions_T.to(x.dtype)[:, None] * frequencies.to(x.dtype)
    turn = torch.polar(torch.ones_like(angles), -angles if inverse else angles)
    turn = turn.view(len(turn), *(1,) * (x.dim() - 2), -1)
    pairs = torch.view_as_complex(x[..., -dim:].unflatten(-1, (-1, 2)).contiguous())
    return torch.cat((x[..., :-dim], torch.view_as_real(pairs * turn).flatten(-2)), -1)
