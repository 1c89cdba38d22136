"""Two passes over lists of rows in blocks of 64, one product a token and block."""

import torch
from torch import Tensor

from unified_models.ops.blocks import BLOCK, blocks, ending_in_zero, filled

CHUNK_BYTES = 1 << 21  # of gathered rows at once: small enough to stay in cache


def token_chunks(q_THD: Tensor, index_TN: Tensor) -> list[slice]:
    """Slices of tokens that bound the gathered rows; a chunk changes no bit."""
    (T, heads, dim), columns = q_THD.shape, index_TN.shape[1]
    size = max(1, CHUNK_BYTES // (4 * (columns * dim + heads * (columns + dim))))
    return [slice(t, min(t + size, T)) for t in range(0, T, size)]


def scores(q_THD: Tensor, keys: list[Tensor], index_TN: Tensor, scale: float) -> Tensor:
    """Scaled scores [T, H, N] of the gathered blocks; -inf where there is no row."""
    out = torch.cat([torch.bmm(q_THD, rows.transpose(1, 2)) for rows in keys], -1) * scale
    return out.masked_fill_((index_TN < 0)[:, None], -torch.inf)


def weights(scores_THN: Tensor, sinks_H: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """exp(score - max), the denominator, and the sink's share of it, exp(sink - max).

    The maximum is over rows only. Each block's 64 terms are summed by torch, blocks in order, the sink last.
    """
    top = scores_THN.amax(-1, keepdim=True)
    e_THN = torch.exp(scores_THN - top)
    total = torch.zeros_like(top[..., 0])
    for b in range(0, e_THN.shape[-1], BLOCK):
        total = total + e_THN[..., b : b + BLOCK].contiguous().sum(-1)
    sink = torch.zeros_like(total) if sinks_H is None else torch.exp(sinks_H - top[..., 0])
    return e_THN, total + sink, sink


def forward(
    q_THD: Tensor, rows_RD: Tensor, index_TN: Tensor, sinks_H: Tensor | None, scale: float
) -> Tensor:
    """float32 [T, H, D]."""
    D, q_THD, rows = q_THD.shape[-1], filled(q_THD), ending_in_zero(rows_RD)
    out = torch.zeros_like(q_THD)
    for chunk in token_chunks(q_THD, index_TN):
        index = index_TN[chunk]
        keys = [rows[index[:, part]] for part in blocks(index)]
        e_THN, total_TH, _ = weights(scores(q_THD[chunk], keys, index, scale), sinks_H)
        acc = torch.zeros_like(q_THD[chunk])
        for part, values in zip(blocks(index), keys, strict=True):
            acc = acc + torch.bmm(e_THN[..., part].contiguous(), values)
        out[chunk] = acc / total_TH[..., None]
    return out[..., :D]


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    rows_RD: Tensor,
    index_TN: Tensor,
    sinks_H: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dq [T, H, D], drows [R, D], dsinks [H], float32. Probabilities are computed again, not saved.

    With o = sum_n p_n r_n and delta = do . o: ds_n = p_n (do . r_n - delta); dq = scale sum ds_n r_n;
    dr_n = sum over tokens and heads of p_n do + scale ds_n q; dsink = -p_sink delta.
    """
    q_THD, dout_THD = filled(q_THD), filled(dout_THD)
    D, dq, rows = rows_RD.shape[-1], torch.zeros_like(q_THD), ending_in_zero(rows_RD)
    drows = torch.zeros(rows_RD.shape, dtype=torch.float32, device=q_THD.device)
    dsinks = None if sinks_H is None else torch.zeros_like(sinks_H)
    for chunk in token_chunks(q_THD, index_TN):
        index, q, dout = index_TN[chunk], q_THD[chunk], dout_THD[chunk]
        keys = [rows[index[:, part]] for part in blocks(index)]
        e_THN, total_TH, sink_TH = weights(scores(q, keys, index, scale), sinks_H)
        p_THN = e_THN / total_TH[..., None]
        dp_THN = torch.cat([torch.bmm(dout, values.transpose(1, 2)) for values in keys], -1)
        delta_TH = (p_THN * dp_THN).sum(-1)
        ds_THN = p_THN * (dp_THN - delta_TH[..., None]) * scale
        for n, values in zip(blocks(index), keys, strict=True):
            dq[chunk] += torch.bmm(ds_THN[..., n], values)
            dr = torch.bmm(p_THN[..., n].transpose(1, 2), dout) + torch.bmm(
                ds_THN[..., n].transpose(1, 2), q
            )
            kept = index[:, n] >= 0
            drows.index_add_(0, index[:, n][kept], dr[kept][:, :D])
        if dsinks is not None:
            share_TH = torch.where(sink_TH.isinf(), 1.0, sink_TH / total_TH)
            dsinks -= (share_TH * delta_TH).sum(0)
    return dq[..., :D], drows, dsinks
