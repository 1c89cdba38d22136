"""The router's choice: the largest key, k times. Whole numbers, so no order matters."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rows import rows_of

TAKEN = tl.constexpr(-(2**63))
"""Below every key."""
LAST = tl.constexpr(-(2**31))
"""Below the bits of every number."""


@triton.jit(do_not_specialize=["stride"])
def _choose(scores_ptr, ids_ptr, stride, E: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):
    """One row: a key is the ordered bits of a score (ops/choose: ordered_bits) above E - e, so that keys differ."""
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    score = tl.load(scores_ptr + t * stride + e, mask=e < E, other=0.0).to(tl.float32)
    bits = tl.where(score == 0, 0.0, score).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    bits = tl.where(score != score, LAST, bits)
    keys = tl.where(e < E, (bits.to(tl.int64) << 32) | (E - e).to(tl.int64), TAKEN)
    for k in range(K):
        best = tl.max(keys, axis=0)
        tl.store(ids_ptr + t * K + k, E - (best & 0x7FFFFFFF))
        keys = tl.where(keys == best, TAKEN, keys)


def choose(scores_TE: Tensor, k: int) -> Tensor:
    """ids_TK, int64: by descending score, ties to the lower expert; NaN after all numbers, lower expert first."""
    scores = rows_of(scores_TE)
    T, E = scores.shape
    ids = torch.empty(*scores_TE.shape[:-1], k, dtype=torch.int64, device=scores.device)
    if T:
        block = max(triton.next_power_of_2(E), 32)
        _choose[(T,)](scores, ids, scores.stride(0), E, k, block, num_warps=1)
    return ids
