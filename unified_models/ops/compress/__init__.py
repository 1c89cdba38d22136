"""A window of tokens as one entry: a gated sum, channel by channel (DeepSeek-V4, eq. 9-12 and 20-23)."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator
from unified_models.ops.pages import Pages, Sequences
from unified_models.ops.rerun import rerun
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


def closing_windows(who: Sequences, tokens: int, stride: int) -> tuple[Tensor, Tensor]:
    """sequence_U, number_U, int32: the windows of `stride` tokens that close in a step of so many tokens, sequence
    after sequence, ascending; behind them -1 and 0, up to min(T, T // stride + S). CUDA only; layers share it."""
    from unified_models.ops.compress.triton import closing

    found: tuple[Tensor, Tensor] = closing(who, tokens, stride)
    return found


def compress_pages(
    kv_TC: Tensor,
    gate_TC: Tensor,
    open: Pages,
    who: Sequences,
    *,
    stride: int,
    overlap: bool,
    dim: int,
    bias: Tensor,
    norm: Tensor,
    eps: float,
    rope_: Rope,
    closing: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """entries_UD, float32, normed and rotated, with sequence_U and number_U (`closing_windows`, or as given): the
    windows that close in this step, read where their tokens lie. CUDA only.

    kv, gate: float32 [T, C] of this step, rows any stride apart, the gate without its bias; C is dim, or 2 * dim where
    windows overlap. open: float32 rows of earlier tokens, C values, then C gates with their bias, of which the last
    2 * stride - 1 or stride - 1 are read; what this step's tokens leave there must be written after this call. bias:
    float32 [stride, C]; norm: [dim]. Entries of sequence -1 are zeros.

    Gradients reach kv, gate, bias and norm, for sequences without past.
    """
    from unified_models.ops.compress import triton as kernels

    sequence_U, number_U = closing or closing_windows(who, len(kv_TC), stride)

    def kernel(kv: Tensor, gate: Tensor, bias: Tensor, norm: Tensor) -> Tensor:
        entries_UD: Tensor = kernels.compress(
            kv, gate, open, who, sequence_U, number_U, stride=stride, overlap=overlap, dim=dim,
            bias=bias, norm=norm, eps=eps, rope_=rope_,
        )  # fmt: skip
        return entries_UD

    def meaning(kv: Tensor, gate: Tensor, bias: Tensor, norm: Tensor) -> Tensor:
        """All tokens of each window are of this step. Where there is none, any row, whose entry is dropped."""
        there_U1 = sequence_U[:, None] >= 0
        s = sequence_U.clamp_min(0).long()
        span = stride * (2 if overlap else 1)
        places = torch.arange(-span, 0, device=kv.device)
        seen_UP = (number_U.long()[:, None] + 1) * stride + places
        index_UP = torch.where(
            seen_UP < 0, -1, (who.starts_S1[s] - who.past_S[s])[:, None] + seen_UP
        )
        index_UP = torch.where(there_U1, index_UP, 0)
        rows = torch.cat((kv, gate + bias[who.position_T.long() % stride]), -1)
        entries_UD = compress(
            rows, index_UP, dim=dim, norm=norm, eps=eps, positions_U=number_U.long() * stride,
            rope_=rope_,
        )  # fmt: skip
        return torch.where(there_U1, entries_UD, 0.0)

    entries_UD: Tensor = rerun(kernel, meaning, kv_TC, gate_TC, bias, norm)
    return entries_UD, sequence_U, number_U
