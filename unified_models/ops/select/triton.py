"""The indexer's choice for any GPU that Triton knows: scores of the entries that a token sees, read where they lie, and
the k highest by the written rule.

A program scores blocks of entries of one token; which blocks, and how many programs share them, moves no bit. The
choice counts and compares whole numbers, which knows no order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.narrow_triton import READ
from unified_models.ops.pages import Pages, Sequences
from unified_models.ops.records_triton import lane_of
from unified_models.ops.rows import aligned

COLUMNS = 64
"""Entries that are multiplied with all heads of a token at once."""
DEPTH = 16
"""Channels that float32 multiplies at once."""
PROGRAMS = 2048
"""Programs of a launch that share the entries of its tokens, at most: enough to fill a GPU."""
WORKSPACE = 256 << 20
"""Bytes of scores that are kept at once; more tokens than that go in several turns."""
BLOCK = 4096
"""Scores that are counted at once."""
NEVER = tl.constexpr(-(2**31))
"""Below the bits of every number."""


@triton.jit
def _dots(
    q, q_at, k_at, i, j_inside, n_inside,
    I: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    CODED: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """[COLUMNS, HEADS]: each entry times each head, channels ascending; in pieces of DEPTH channels q is read again."""
    if DEPTH == WIDE:
        k = tl.load(k_at[:, None] + i[None, :], mask=n_inside[:, None] & (i < I)[None, :], other=0)
        if CODED:
            k = k.to(tl.float8e4nv, bitcast=True)
        return tl.dot(k.to(READ), tl.trans(q), input_precision="ieee")
    else:
        total = tl.zeros((COLUMNS, HEADS), dtype=tl.float32)
        for start in range(0, WIDE, DEPTH):
            d = start + tl.arange(0, DEPTH)
            inside = d < I
            k = tl.load(
                k_at[:, None] + d[None, :], mask=n_inside[:, None] & inside[None, :], other=0
            )
            part = tl.load(
                q_at[:, None] + d[None, :], mask=j_inside[:, None] & inside[None, :], other=0
            )
            total = tl.dot(k.to(READ), tl.trans(part.to(READ)), total, input_precision="ieee")
        return total


@triton.jit(do_not_specialize=["first", "splits", "table_row", "N", "page"])
def _scores(
    q_ptr, weights_ptr, keys_ptr, table_ptr, sequence_ptr, count_ptr, out_ptr,
    first, splits, table_row, N, page, row, start,
    J: tl.constexpr, I: tl.constexpr, HEADS: tl.constexpr, WIDE: tl.constexpr,
    DEPTH: tl.constexpr, COLUMNS: tl.constexpr, PER_PAGE: tl.constexpr, RING: tl.constexpr,
    LANE: tl.constexpr, CODED: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """out[t - first, n] = sum_j weights[t, j] relu(q[t, j] . key n of its sequence), n below the token's count."""
    t = first + tl.program_id(0).to(tl.int64)
    s = tl.load(sequence_ptr + t).to(tl.int64)
    count = tl.load(count_ptr + t, mask=s >= 0, other=0).to(tl.int32)
    j, i = tl.arange(0, HEADS), tl.arange(0, WIDE)
    weights = tl.load(weights_ptr + t * J + j, mask=j < J, other=0.0)
    q_at = q_ptr + (t * J + j) * I
    q = tl.load(q_at[:, None] + i[None, :], mask=(j < J)[:, None] & (i < I)[None, :], other=0.0)
    q = q.to(READ)
    for block in range(tl.program_id(1), tl.cdiv(count, COLUMNS), splits):
        n = block * COLUMNS + tl.arange(0, COLUMNS)
        inside = n < count
        number = tl.load(table_ptr + s * table_row + n // PER_PAGE, mask=inside, other=0)
        at = number.to(tl.int64) * page + (n % PER_PAGE % RING).to(tl.int64) * row + start
        k_at = keys_ptr + at * LANE
        dots = _dots(q, q_at, k_at, i, j < J, inside, I, WIDE, DEPTH, READ, CODED, HEADS, COLUMNS)
        # NaN stays NaN, which is never chosen
        dots = tl.where(dots < 0, 0.0, dots) * weights[None, :]
        scores = tl.sum(dots, axis=1)
        if CODED:
            # The key's scale, a float32 that may lie on any byte: a power of two, so it may multiply the sum.
            bits = tl.zeros((COLUMNS,), dtype=tl.int32)
            for b in tl.static_range(4):
                byte = tl.load(k_at + I + b, mask=inside, other=0)
                bits |= byte.to(tl.int32) << (8 * b)
            scores *= bits.to(tl.float32, bitcast=True)
        out_at = out_ptr + tl.program_id(0).to(tl.int64) * N + n
        tl.store(out_at, scores, mask=inside)


@triton.jit
def _keys(scores_at, n, count):
    """Ordered bits of scores (ops/choose: ordered_bits); NEVER for NaN and where there is no entry."""
    x = tl.load(scores_at + n, mask=(n >= 0) & (n < count), other=float("nan"))
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, NEVER, bits)


@triton.jit
def _kth(scores_at, count, K: tl.constexpr, BLOCK: tl.constexpr):
    """The K-th highest of the keys, and how many are above it; NEVER if fewer are numbers. Two bits of it a turn: how
    many keys reach each of the three numbers that they may add."""
    low = tl.full((), -(2**31), dtype=tl.int64)
    unit = tl.full((), 2**30, dtype=tl.int64)
    above = tl.full((), 0, dtype=tl.int32)
    for _ in range(16):
        reach1 = tl.zeros((BLOCK,), dtype=tl.int32)
        reach2 = tl.zeros((BLOCK,), dtype=tl.int32)
        reach3 = tl.zeros((BLOCK,), dtype=tl.int32)
        for start in range(0, count, BLOCK):
            keys = _keys(scores_at, start + tl.arange(0, BLOCK), count)
            reach1 += (keys >= (low + unit).to(tl.int32)).to(tl.int32)
            reach2 += (keys >= (low + 2 * unit).to(tl.int32)).to(tl.int32)
            reach3 += (keys >= (low + 3 * unit).to(tl.int32)).to(tl.int32)
        sum1, sum2, sum3 = tl.sum(reach1, 0), tl.sum(reach2, 0), tl.sum(reach3, 0)
        step = (sum1 >= K).to(tl.int32) + (sum2 >= K).to(tl.int32) + (sum3 >= K).to(tl.int32)
        # Keys that reach the next number up, of which there are fewer than K.
        beyond = tl.where(step == 0, sum1, tl.where(step == 1, sum2, sum3))
        above = tl.where(step < 3, beyond, above)
        low += step.to(tl.int64) * unit
        unit = unit >> 2
    return low.to(tl.int32), above


@triton.jit(do_not_specialize=["N", "first"])
def _top(
    scores_ptr, sequence_ptr, count_ptr, picks_ptr, first, N,
    K: tl.constexpr, BLOCK: tl.constexpr, FILL: tl.constexpr,
):  # fmt: skip
    """The picks of one token: all keys above the K-th, of its equals the latest, in descending order of position."""
    at = tl.program_id(0).to(tl.int64)
    t = first + at
    s = tl.load(sequence_ptr + t)
    count = tl.load(count_ptr + t, mask=s >= 0, other=0).to(tl.int32)
    scores_at, picks_at = scores_ptr + at * N, picks_ptr + t * K
    kth, above = tl.full((), -(2**31), dtype=tl.int32), tl.full((), 0, dtype=tl.int32)
    if count > K:
        kth, above = _kth(scores_at, count, K, BLOCK)
    wanted = tl.where(kth == NEVER, 0, K - above)
    taken = tl.full((), 0, dtype=tl.int32)
    equals = tl.full((), 0, dtype=tl.int32)
    for start in range(0, count, BLOCK):
        n = count - 1 - start - tl.arange(0, BLOCK)
        keys = _keys(scores_at, n, count)
        equal = ((keys == kth) & (keys != NEVER)).to(tl.int32)
        rank = equals + tl.cumsum(equal, axis=0)
        take = (keys > kth) | ((equal > 0) & (rank <= wanted))
        place = taken + tl.cumsum(take.to(tl.int32), axis=0) - 1
        tl.store(picks_at + place, n.to(tl.int64), mask=take)
        equals += tl.sum(equal, axis=0)
        taken += tl.sum(take.to(tl.int32), axis=0)
    for start in range(0, K, FILL):
        k = start + tl.arange(0, FILL)
        tl.store(picks_at + k, tl.full((FILL,), -1, dtype=tl.int64), mask=(k >= taken) & (k < K))


def select(
    q_TJI: Tensor,
    weights_TJ: Tensor,
    keys: Pages,
    who: Sequences,
    count_T: Tensor,
    k: int,
    most_entries: int,
) -> Tensor:
    """picks_TK, int64; see `ops.select.select_pages`."""
    T = len(q_TJI)
    q_TJI, weights_TJ = q_TJI.contiguous(), weights_TJ.float().contiguous()
    picks_TK = torch.empty(T, k, dtype=torch.int64, device=q_TJI.device)
    N = max(-(-most_entries // COLUMNS) * COLUMNS, COLUMNS)
    chunk = min(max(WORKSPACE // (4 * N), 1), T)
    scores_TN = torch.empty(chunk, N, dtype=torch.float32, device=q_TJI.device)
    for first in range(0, T, chunk):
        tokens = min(chunk, T - first)
        scores(q_TJI, weights_TJ, keys, who, count_T, first, scores_TN[:tokens])
        top(scores_TN[:tokens], who, count_T, first, picks_TK)
    return picks_TK


def scores(
    q_TJI: Tensor,
    weights_TJ: Tensor,
    keys: Pages,
    who: Sequences,
    count_T: Tensor,
    first: int,
    out_TN: Tensor,
    splits: int | None = None,
) -> None:
    """Scores of tokens first, first + 1, ... into out; what is behind a token's count is left as it was. splits:
    programs that share a token's entries, for tests."""
    (_, J, I), (tokens, N) = q_TJI.shape, out_TN.shape
    lane, coded = lane_of(keys), keys.values.dtype == torch.uint8
    read = tl.float32 if keys.values.dtype == torch.float32 else READ
    wide = max(triton.next_power_of_2(I), 16)
    depth = wide if coded or keys.values.dtype == torch.bfloat16 else DEPTH
    splits = splits or max(min(PROGRAMS // tokens, N // COLUMNS), 1)
    _scores[(tokens, splits)](
        aligned(q_TJI), aligned(weights_TJ), keys.values, keys.table_SK,
        who.sequence_T, count_T, out_TN, first, splits, keys.table_SK.stride(0), N,
        keys.page // lane, keys.row // lane, keys.start // lane,
        J, I, max(triton.next_power_of_2(J), 16), wide, depth, COLUMNS,
        keys.per_page, keys.ring, lane, coded, read,
        num_warps=4, num_stages=2, enable_fp_fusion=False,
    )  # fmt: skip


def top(
    scores_TN: Tensor,
    who: Sequences,
    count_T: Tensor,
    first: int,
    picks_TK: Tensor,
    block: int | None = None,
) -> None:
    """The picks of tokens first, first + 1, ... by their scores. block: scores that are counted at once, for tests."""
    (tokens, N), k = scores_TN.shape, picks_TK.shape[1]
    block = block or min(max(triton.next_power_of_2(N), 64), BLOCK)
    _top[(tokens,)](
        scores_TN, who.sequence_T, count_T, picks_TK, first, N,
        k, block, max(min(triton.next_power_of_2(k), 1024), 32),
        num_warps=max(min(block // 512, 8), 1),
    )  # fmt: skip
