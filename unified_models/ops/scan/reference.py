"""The recurrence itself, token by token, in the precision of its input (Dao and Gu 2024, eq. 2 with scalar decay)."""

import torch
from torch import Tensor


def scan(
    x_THP: Tensor, dt_TH: Tensor, b_TGN: Tensor, c_TGN: Tensor, a_H: Tensor, skip_H: Tensor
) -> Tensor:
    """One sequence from position 0."""
    each = x_THP.shape[1] // b_TGN.shape[1]
    b_THN, c_THN = (v.repeat_interleave(each, 1) for v in (b_TGN, c_TGN))
    state = x_THP.new_zeros(*x_THP.shape[1:], b_TGN.shape[-1])
    rows = []
    for x, dt, b, c in zip(x_THP, dt_TH, b_THN, c_THN, strict=True):
        state = (
            torch.exp(dt * a_H)[:, None, None] * state + (dt[:, None] * x)[..., None] * b[:, None]
        )
        rows.append(torch.einsum("hpn,hn->hp", state, c) + skip_H[:, None] * x)
    return torch.stack(rows) if rows else torch.zeros_like(x_THP)
