"""Two passes over lists of rows in blocks of 64, one product a token and block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from unified_models.ops.blocks import BLOCK, blocks, ending_in_zero, filled
from unified_models.ops.products import bmm
from unified_models.ops.sums import add_rows_, row_sum

CHUNK_BYTES = 1 << 21  # of gathered rows at once: small enough to stay in cache


def token_chunks(q_THD: Tensor, index_TN: Tensor) -> list[slice]:
    """Slices of tokens that bound the gathered rows; a chunk changes no bit."""
    (T, heads, dim), columns = q_THD.shape, index_TN.shape[1]
    size = max(1, CHUNK_BYTES // (4 * (columns * dim + heads * (columns + dim))))
    return [slice(t, min(t + size, T)) for t in range(0, T, size)]


def scores(q_THD: Tensor, keys: list[Tensor], index_TN: Tensor, scale: float) -> Tensor:
    """Scaled scores [T, H, N] of the gathered blocks; -inf where there is no row."""
    out = torch.cat([bmm(q_THD, rows.transpose(1, 2)) for rows in keys], -1) * scale
    return out.masked_fill_((index_TN < 0)[:, None], -torch.inf)


def weights(scores_THN: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - max), the denominator, and the sink's share of it, exp(sink - max).

    The maximum is over rows only. Each block's 64 terms are summed by torch, blocks in order, the sink last.
    """
    top = scores_THN.amax(-1, keepdim=True)
    e_THN = torch.exp(scores_THN - top)
    total = torch.zeros_like(top[..., 0])
    for b in range(0, e_THN.shape[-1], BLOCK):
        total = total + row_sum(e_THN[..., b : b + BLOCK].contiguous())[..., 0]
    sink = torch.zeros_like(total) if sinks_H is None else torch.exp(sinks_H - top[..., 0])
    return e_THN, total + sink, sink


@dataclass(frozen=True)
class Gathered:
    """The key and value rows of a chunk of tokens, block by block, [t, 64, D'] each; one list where they are the same
    rows."""

    keys: list[Tensor]
    values: list[Tensor]

    @classmethod
    def of(cls, keys_RD: Tensor, values_RD: Tensor, index: Tensor) -> "Gathered":
        keys = [keys_RD[index[:, part]] for part in blocks(index)]
        if values_RD is keys_RD:
            return cls(keys, keys)
        return cls(keys, [values_RD[index[:, part]] for part in blocks(index)])


def prepared(keys_RD: Tensor, values_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Both, each ending in a row of zeros; one tensor where they are the same rows."""
    keys = ending_in_zero(keys_RD)
    return keys, keys if values_RD is keys_RD else ending_in_zero(values_RD)


def forward(
    q_THD: Tensor,
    keys_RD: Tensor,
    values_RD: Tensor,
    index_TN: Tensor,
    sinks_H: Tensor | None,
    scale: float,
) -> Tensor:
    """float32 [T, H, D]; every head reads the same keys and values."""
    D, q_THD, rows = values_RD.shape[-1], filled(q_THD), prepared(keys_RD, values_RD)
    out = q_THD.new_zeros(*q_THD.shape[:2], rows[1].shape[-1])
    for chunk in token_chunks(q_THD, index_TN):
        index = index_TN[chunk]
        read = Gathered.of(*rows, index)
        e_THN, total_TH, _ = weights(scores(q_THD[chunk], read.keys, index, scale), sinks_H)
        acc = torch.zeros_like(out[chunk])
        for part, values in zip(blocks(index), read.values, strict=True):
            acc = acc + bmm(e_THN[..., part].contiguous(), values)
        out[chunk] = acc / total_TH[..., None]
    return out[..., :D]


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    keys_RD: Tensor,
    values_RD: Tensor,
    index_TN: Tensor,
    sinks_H: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """dq [T, H, D], dkeys and dvalues [R, D], dsinks [H], float32. Probabilities are computed again, not saved.

    With o = sum_n p_n v_n and delta = do . o: ds_n = p_n (do . v_n - delta); dq = scale sum ds_n k_n; over tokens and
    heads, dk_n = sum scale ds_n q and dv_n = sum p_n do; dsink = -p_sink delta.
    """
    q_THD, dout_THD = filled(q_THD), filled(dout_THD)
    D, dq, rows = keys_RD.shape[-1], torch.zeros_like(q_THD), prepared(keys_RD, values_RD)
    dkeys, dvalues = (torch.zeros_like(x, dtype=torch.float32) for x in (keys_RD, values_RD))
    dsinks = None if sinks_H is None else torch.zeros_like(sinks_H)
    for chunk in token_chunks(q_THD, index_TN):
        index, q, dout = index_TN[chunk], q_THD[chunk], dout_THD[chunk]
        read = Gathered.of(*rows, index)
        e_THN, total_TH, sink_TH = weights(scores(q, read.keys, index, scale), sinks_H)
        p_THN = e_THN / total_TH[..., None]
        dp_THN = torch.cat([bmm(dout, values.transpose(1, 2)) for values in read.values], -1)
        delta_TH = (p_THN * dp_THN).sum(-1)  # of a gradient
        ds_THN = p_THN * (dp_THN - delta_TH[..., None]) * scale
        for n, keys in zip(blocks(index), read.keys, strict=True):
            dq[chunk] += bmm(ds_THN[..., n], keys)
            kept = index[:, n] >= 0
            dk = bmm(ds_THN[..., n].transpose(1, 2), q)
            add_rows_(dkeys, index[:, n][kept], dk[kept][:, :D])
            dv = bmm(p_THN[..., n].transpose(1, 2), dout)
            add_rows_(dvalues, index[:, n][kept], dv[kept][:, : values_RD.shape[-1]])
        if dsinks is not None:
            share_TH = torch.where(sink_TH.isinf(), 1.0, sink_TH / total_TH)
            dsinks -= (share_TH * delta_TH).sum(0)  # a gradient
    return dq[..., :D], dkeys, dvalues, dsinks
