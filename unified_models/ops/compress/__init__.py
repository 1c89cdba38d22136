"""A window of tokens as one entry: a gated sum, channel by channel (DeepSeek-V4, eq. 9-12 and 20-23)."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator
from unified_models.ops.rms_norm import rms_norm
from unified_models.ops.rope import Rope, rope
from unified_models.ops.sums import row_sum


@operator
def compress(
    open_RC: Tensor,
    index_UP: Tensor,
    *,
    dim: int,
    norm: Tensor,
    eps: float,
    positions_U: Tensor,
    rope_: Rope,
) -> Tensor:
    """entries_UD, float32: normed and rotated, not yet rounded.

    open_RC: float32 rows, values then gates (bias added), each dim or, for overlapping windows, 2 * dim channels.
    index_UP: the rows that window u reads, oldest first; -1 before the sequence's start. An overlapping window reads
    its first half of rows in channels [0, dim), its second half in [dim, 2 * dim). positions_U: of the rope.
    """
    values, gates = open_RC.chunk(2, -1)
    missing = (index_UP < 0)[..., None]
    index = index_UP.clamp_min(0)
    if values.shape[-1] == dim:
        v_UPD, g_UPD = values[index], gates[index]
    else:
        before, own = index.chunk(2, -1)
        v_UPD = torch.cat((values[before, :dim], values[own, dim:]), 1)
        g_UPD = torch.cat((gates[before, :dim], gates[own, dim:]), 1)
    v_UPD = v_UPD.masked_fill(missing, 0.0)
    g_UPD = g_UPD.masked_fill(missing, -torch.inf)
    # The window is laid out last and contiguous: sums over it have one order, for any number of windows.
    v_UDP, g_UDP = v_UPD.transpose(1, 2).contiguous(), g_UPD.transpose(1, 2).contiguous()
    e_UDP = torch.exp(g_UDP - g_UDP.amax(-1, keepdim=True).detach())
    entries_UD = row_sum(e_UDP / row_sum(e_UDP) * v_UDP)[..., 0]
    return rope(rms_norm(entries_UD, norm, eps), positions_U, rope_)
