"""The indexer's choice of entries: scores, and one written rule for the top k."""

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.ops.blocks import BLOCK, blocks, ending_in_zero, filled, whole
from unified_models.ops.choose import NEVER, ordered_bits
from unified_models.ops.operator import operator
from unified_models.ops.pages import Pages, Sequences
from unified_models.ops.products import bmm
from unified_models.ops.sums import row_sum

CHUNK_BYTES = 1 << 21  # of gathered rows at once: small enough to stay in cache


def scores(q_TJI: Tensor, weights_TJ: Tensor, rows_RI: Tensor, index_TN: Tensor) -> Tensor:
    """sum_j weights[j] * relu(q[j] . row), float32 [T, N], for the rows that index_TN names (-1: a row of zeros).

    Entries in blocks of 64, one product [J, I] x [I, 64] a token and block; heads are summed by torch over J
    contiguous values.
    """
    return _scores(filled(q_TJI), weights_TJ, ending_in_zero(rows_RI), index_TN)


def _scores(q_TJI: Tensor, weights_TJ: Tensor, rows_RI: Tensor, index_TN: Tensor) -> Tensor:
    out = q_TJI.new_empty(index_TN.shape)
    for part in blocks(index_TN):
        keys = rows_RI[index_TN[:, part]]
        dots = bmm(q_TJI, keys.transpose(1, 2)).relu_() * weights_TJ[..., None]
        out[:, part] = row_sum(dots.transpose(1, 2).contiguous())[..., 0]
    return out


def top(scores_TN: Tensor, count_T: Tensor, k: int) -> Tensor:
    """picks_TK by the rule, from row-wise scores of entries 0 .. count - 1."""
    N = scores_TN.shape[-1]
    places_N = torch.arange(N, device=scores_TN.device)
    keys = (ordered_bits(scores_TN) << 32) | places_N
    keys = keys.masked_fill(scores_TN.isnan() | (places_N >= count_T[:, None]), NEVER)
    best = keys.topk(min(k, N), -1).values  # all keys differ, so no tie is left to topk
    picks = torch.where(best == NEVER, -1, best & 0xFFFFFFFF).sort(-1, descending=True).values
    return F.pad(picks, (0, k - picks.shape[-1]), value=-1)


@operator
def select(
    q_TJI: Tensor, weights_TJ: Tensor, rows_RI: Tensor, base_T: Tensor, count_T: Tensor, k: int
) -> Tensor:
    """picks_TK, int64: the k entries with the highest score, all of them where there are fewer.

    Rule: higher score first (-0 is +0), ties to the later entry, NaN never; the result in descending order of
    position, -1 (none) last. q_TJI, weights_TJ, rows_RI: float32. Entry w of token t is rows[base[t] + w],
    w < count[t]. No gradient. Tokens are taken in chunks, so memory is bounded; a chunk changes no bit.
    """
    T, J, index_dim = q_TJI.shape
    most = int(count_T.max()) if T else 0
    picks_TK = count_T.new_full((T, k), -1)
    if most == 0:
        return picks_TK
    rows_RI = ending_in_zero(rows_RI)
    columns = torch.arange(whole(most), device=count_T.device)
    chunk = max(1, CHUNK_BYTES // (4 * BLOCK * max(index_dim, J) + 24 * len(columns)))
    with torch.no_grad():
        for t in range(0, T, chunk):
            part = slice(t, t + chunk)
            seen = columns < count_T[part, None]
            index = torch.where(seen, base_T[part, None] + columns, -1)
            part_scores = _scores(filled(q_TJI[part]), weights_TJ[part], rows_RI, index)
            picks_TK[part] = top(part_scores, count_T[part], k)
    return picks_TK


def select_pages(
    q_TJI: Tensor,
    weights_TJ: Tensor,
    keys: Pages,
    who: Sequences,
    count_T: Tensor,
    k: int,
    most_entries: int,
) -> Tensor:
    """picks_TK, int64, by the rule of `select`: of the entries 0 .. count[t] - 1 of the token's sequence, read where
    they lie. Tokens of sequence -1 pick nothing. No gradient. CUDA only.

    q: what comes back from the keys' record, which bfloat16 holds, in bfloat16 or float32. weights: float32. keys:
    `VectorFP8` records as uint8, or plain rows in bfloat16 or float32 (then q is multiplied in float32). count: int32
    or int64. most_entries: no token sees more. How many bytes of scores are kept at once follows it, and no bit.
    """
    from unified_models.ops.select.triton import select

    picks_TK: Tensor = select(
        q_TJI.detach(), weights_TJ.detach(), keys, who, count_T, k, most_entries
    )
    return picks_TK
