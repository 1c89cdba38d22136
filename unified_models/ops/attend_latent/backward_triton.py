"""Gradients of latent attention over flat rows, for any GPU that Triton knows.

A row is read by tokens whose lists differ, so that no tile of rows has readers in common. What a token adds to a row of
its list is therefore written down, a part of D values, and the parts of a row are added by another kernel, in the order
of a stable sort. No sum is an atomic one: the order of each follows from shapes and lists.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.attend.triton import line
from unified_models.ops.attend_latent import listed
from unified_models.ops.attend_latent.triton import LOG2E, strides
from unified_models.ops.blocks import BLOCK, whole
from unified_models.ops.linear.narrow_triton import READ
from unified_models.ops.pages import Pages, Sequences

ROWS = 64
"""Heads that are multiplied at once: the rows of a tensor core's tile."""
KEYS = 32
"""Rows of its list that meet a token's heads at once: two blocks, q and dout fit into Hopper's shared memory."""
WIDEST = 512
OF_QUERIES, COLUMNS = 256, 128
"""Channels of a tile of dq, and of one of parts."""
DELTAS = 8
"""Heads whose delta one program computes."""
READERS = 8
"""Parts of a row that are added at once."""
WORKSPACE = 1 << 30
"""Bytes of probabilities and parts that are kept at once; more tokens than that go in several turns."""


class Lists(NamedTuple):
    """The rows that tokens read, places of the pool first: index_TN, int32, rows of the pool's memory in places 0 .. P
    - 1 and of the window's behind, -1 for none. blocks_T2: of 64 places of each, up to the last that names a row."""

    index_TN: Tensor
    blocks_T2: Tensor
    P: int


class Readers(NamedTuple):
    """Who reads a row. order: token * N + place of all list places, by turn and row, tokens ascending. starts: where
    those of turn z and row r begin in it, at z * R + r; rows of the pool come before the window's."""

    order: Tensor
    starts: Tensor


def takes(q_THD: Tensor, rows: Tensor) -> bool:
    """Whether these kernels have a tile for such rows."""
    return q_THD.dtype == rows.dtype == torch.bfloat16 and q_THD.shape[-1] <= WIDEST


@triton.jit
def _read(at, live, d, D: tl.constexpr, READ: tl.constexpr):
    """Channels d of the rows at `at`; zeros for those not live."""
    return tl.load(at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0).to(
        READ
    )


@triton.jit
def _deltas(
    dout_ptr, out_ptr, sequence_ptr, delta_ptr,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """delta = do . o of a token's heads; 0 for padding."""
    token = tl.program_id(0)
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDE)
    live = h < tl.where(tl.load(sequence_ptr + token) < 0, 0, H)
    at = token.to(tl.int64) * H + h
    dout = _read(dout_ptr + at * D, live, d, D, tl.float32)
    out = _read(out_ptr + at * D, live, d, D, tl.float32)
    tl.store(delta_ptr + at, tl.sum(dout * out, axis=1), mask=h < H)  # a gradient


@triton.jit
def _place(j, listed, places, KEYS: tl.constexpr):
    """The first place of a token's block j, of which `listed` are the pool's."""
    return tl.where(j < listed, j * KEYS, places + (j - listed) * KEYS)


@triton.jit(do_not_specialize=["first"])
def _probabilities(
    q_ptr, pool_ptr, window_ptr, dout_ptr, lse_ptr, delta_ptr, p_ptr, ds_ptr, ds_of_q_ptr,
    index_ptr, blocks_ptr, sequence_ptr, first, places, width, scale, factor,
    STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, POOL_ROW: tl.constexpr, WINDOW_ROW: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, KEYS: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Of ROWS heads of a token and the places of its list: p and scale ds [N, H], for `_parts`, and scale ds again [H,
    N], for `_queries`: what is multiplied from the left lies as it is multiplied.

    A place without a row has a finite p, and nobody reads what follows from it.
    """
    i = tl.program_id(0)
    token = (first + i).to(tl.int64)
    if tl.load(sequence_ptr + token) < 0:
        return
    listed = tl.load(blocks_ptr + 2 * token) * (BLOCK // KEYS)
    blocks = listed + tl.load(blocks_ptr + 2 * token + 1) * (BLOCK // KEYS)
    h, d, n = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE), tl.arange(0, KEYS)
    live = h < H
    q = _read(q_ptr + token * STRIDE_T + h * STRIDE_H, live, d, D, READ)
    dout = _read(dout_ptr + (token * H + h) * D, live, d, D, READ)
    lse = tl.load(lse_ptr + token * H + h, mask=live, other=float("inf"))
    delta = tl.load(delta_ptr + token * H + h, mask=live, other=0.0)
    index_at, to = index_ptr + token * width, i.to(tl.int64) * width * H
    place = _place(0, listed, places, KEYS)
    index = tl.load(index_at + place + n)
    for j in range(blocks):
        # a block ahead, so that no row waits for its number
        after = _place(j + 1, listed, places, KEYS)
        following = tl.load(index_at + after + n, mask=after + n < width, other=-1)
        rows_ptr = tl.where(j < listed, pool_ptr, window_ptr)
        row = tl.where(j < listed, POOL_ROW, WINDOW_ROW)
        rows = _read(rows_ptr + index.to(tl.int64) * row, index >= 0, d, D, READ)
        scores = tl.dot(q, tl.trans(rows), input_precision="ieee")
        dp = tl.dot(dout, tl.trans(rows), input_precision="ieee")
        # no probability is above 1, nor what a place without a row would have
        p = tl.exp2(tl.minimum(scores * factor - lse[:, None], 0.0))
        ds = (p * (dp - delta[:, None]) * scale).to(ROUND)
        at = to + ((place + n) * H)[None, :] + h[:, None]
        tl.store(p_ptr + at, p.to(ROUND), mask=live[:, None])
        tl.store(ds_ptr + at, ds, mask=live[:, None])
        at = to + (place + n)[None, :] + (h * width)[:, None]
        tl.store(ds_of_q_ptr + at, ds, mask=live[:, None])
        index, place = following, after


@triton.jit(do_not_specialize=["first"])
def _queries(
    pool_ptr, window_ptr, ds_ptr, dq_ptr, index_ptr, blocks_ptr, sequence_ptr, first, places, width,
    H: tl.constexpr, D: tl.constexpr, POOL_ROW: tl.constexpr, WINDOW_ROW: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """COLUMNS channels of dq of ROWS heads of a token: sum_n scale ds_n row_n, list places ascending."""
    ACROSS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    i = tl.program_id(0) // ACROSS
    token = (first + i).to(tl.int64)
    if tl.load(sequence_ptr + token) < 0:
        return
    listed = tl.load(blocks_ptr + 2 * token)
    blocks = listed + tl.load(blocks_ptr + 2 * token + 1)
    h, n = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, BLOCK)
    d = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    live = h < H
    index_at = index_ptr + token * width
    ds_at = ds_ptr + (i.to(tl.int64) * H + h) * width
    dq = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    place = _place(0, listed, places, BLOCK)
    index = tl.load(index_at + place + n)
    for j in range(blocks):
        after = _place(j + 1, listed, places, BLOCK)
        following = tl.load(index_at + after + n, mask=after + n < width, other=-1)
        rows_ptr = tl.where(j < listed, pool_ptr, window_ptr)
        row = tl.where(j < listed, POOL_ROW, WINDOW_ROW)
        rows = _read(rows_ptr + index.to(tl.int64) * row, index >= 0, d, D, READ)
        ds = tl.load(ds_at[:, None] + (place + n)[None, :], mask=live[:, None], other=0.0).to(READ)
        dq = tl.dot(ds, rows, dq, input_precision="ieee")
        index, place = following, after
    at = (token * H + h) * D
    both = live[:, None] & (d < D)[None, :]
    tl.store(dq_ptr + at[:, None] + d[None, :], dq.to(dq_ptr.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["first"])
def _parts(
    q_ptr, dout_ptr, p_ptr, ds_ptr, parts_ptr, blocks_ptr, sequence_ptr, first, places, width,
    STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """What a token adds to the rows at BLOCK places of its list, as values and as keys: sum_h p do + scale ds q."""
    ACROSS: tl.constexpr = (D + COLUMNS - 1) // COLUMNS
    each = width // BLOCK * ACROSS  # programs of a token, one after the other: they read the same
    i, rest = tl.program_id(0) // each, tl.program_id(0) % each
    token, n0 = (first + i).to(tl.int64), rest // ACROSS * BLOCK
    pool, window = tl.load(blocks_ptr + 2 * token), tl.load(blocks_ptr + 2 * token + 1)
    end = tl.where(n0 < places, pool * BLOCK, places + window * BLOCK)
    if (tl.load(sequence_ptr + token) < 0) | (n0 >= end):
        return
    n, d = n0 + tl.arange(0, BLOCK), rest % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    to = i.to(tl.int64) * width + n
    part = tl.zeros((BLOCK, COLUMNS), dtype=tl.float32)
    for h0 in range(0, H, ROWS):
        h = h0 + tl.arange(0, ROWS)
        live, at = h < H, (to * H)[:, None] + h[None, :]
        p = tl.load(p_ptr + at, mask=live[None, :], other=0.0).to(READ)
        dout = _read(dout_ptr + (token * H + h) * D, live, d, D, READ)
        part = tl.dot(p, dout, part, input_precision="ieee")
        ds = tl.load(ds_ptr + at, mask=live[None, :], other=0.0).to(READ)
        q = _read(q_ptr + token * STRIDE_T + h * STRIDE_H, live, d, D, READ)
        part = tl.dot(ds, q, part, input_precision="ieee")
    tl.store(parts_ptr + (to * D)[:, None] + d[None, :], part, mask=(d < D)[None, :])


@triton.jit(do_not_specialize=["turn", "before"])
def _summed(
    parts_ptr, order_ptr, starts_ptr, sums_ptr, turn, before,
    D: tl.constexpr, WIDE: tl.constexpr, READERS: tl.constexpr,
):  # fmt: skip
    """A row's parts of a turn, tokens ascending, onto those of the turns before. before: list places of those."""
    row = tl.program_id(0)
    at = starts_ptr + turn * tl.num_programs(0) + row
    begin, end = tl.load(at), tl.load(at + 1)
    if begin >= end:
        return
    i, d = tl.arange(0, READERS), tl.arange(0, WIDE)
    to = sums_ptr + row.to(tl.int64) * D + d
    total = tl.load(to, mask=d < D, other=0.0)
    for i0 in range(begin, end, READERS):
        there = i0 + i < end
        pair = tl.load(order_ptr + i0 + i, mask=there, other=0) - before
        parts = _read(parts_ptr + pair * D, there, d, D, tl.float32)
        total += tl.sum(parts, axis=0)  # a gradient
    tl.store(to, total, mask=d < D)


def lists(
    window: Pages,
    who: Sequences,
    keep: int,
    pool: Pages | None,
    count_T: Tensor | None,
    picks_TK: Tensor | None,
    most_entries: int,
) -> Lists:
    """Of every token, of padding nothing: the window's without gaps, from the oldest. Nothing waits for the device."""
    position_T, sequence_T = who.position_T.long(), who.sequence_T.long()
    there_T1, sequence_T = (sequence_T >= 0)[:, None], sequence_T.clamp_min(0)
    oldest_T1 = (position_T - keep + 1).clamp_min(0)[:, None]
    recent_TW = oldest_T1 + torch.arange(whole(keep), device=position_T.device)
    recent_TW = recent_TW.masked_fill((recent_TW > position_T[:, None]) | ~there_T1, -1)
    pool_TN = recent_TW[:, :0]
    if pool is not None:
        pool_TN = listed.pool_lists(count_T, picks_TK, most_entries).masked_fill(~there_T1, -1)
    rows, ends = [], []
    for pages, n_TN in ((pool, pool_TN), (window, recent_TW)):
        base_T1 = 0 if pages is None else pages.table_SK[:, 0].long()[sequence_T][:, None]
        rows.append((n_TN + base_T1).masked_fill(n_TN < 0, -1))
        place_N = torch.arange(1, n_TN.shape[1] + 1, device=n_TN.device)
        nothing = place_N.new_zeros(len(n_TN), 1)
        ends.append(torch.cat((nothing, (n_TN >= 0) * place_N), 1).amax(1))
    blocks_T2 = (torch.stack(ends, 1) + BLOCK - 1) // BLOCK
    return Lists(torch.cat(rows, 1).int(), blocks_T2.int(), pool_TN.shape[1])


def readers(tokens: Lists, turn: int, pool_rows: int, rows: int) -> Readers:
    """Tokens of `turn` at a time, of `rows` rows, those of the pool first."""
    T, N = tokens.index_TN.shape
    turns, device = -(-T // turn), tokens.index_TN.device
    kind = torch.int32 if turns * rows < 2**31 else torch.int64
    first_T1 = (torch.arange(T, device=device, dtype=kind) // turn * rows)[:, None]
    first_N = (torch.arange(N, device=device) >= tokens.P).to(kind) * pool_rows
    key_TN = first_T1 + first_N + tokens.index_TN
    key_TN = key_TN.masked_fill(tokens.index_TN < 0, turns * rows)
    keys, order = key_TN.flatten().sort(stable=True)
    each = torch.arange(turns * rows + 1, device=device, dtype=kind)
    return Readers(order, torch.searchsorted(keys, each, out_int32=T * N < 2**31))


def gradients(
    dout_THD: Tensor,
    q_THD: Tensor,
    window: Pages,
    who: Sequences,
    out_THD: Tensor,
    lse_TH: Tensor,
    *,
    scale: float,
    keep: int,
    sinks_H: Tensor | None = None,
    pool: Pages | None = None,
    count_T: Tensor | None = None,
    picks_TK: Tensor | None = None,
    most_entries: int = 0,
    memory: int = WORKSPACE,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Of q, of the values of the window and of the pool, and of the sinks: float32 sums, rounded once to the dtype of
    each; zeros for tokens of padding and for rows that no token reads.

    out_THD, lse_TH: what `triton.attend_latent` gave and filled. Pages are flat. For tests: memory, bytes of parts at
    once; other turns add in another order.
    """
    T, H, D = q_THD.shape
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    dout_THD, delta_TH = dout_THD.contiguous(), torch.empty_like(lse_TH)
    dq_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    wide = max(16, triton.next_power_of_2(D))
    _deltas[(T, triton.cdiv(H, DELTAS))](
        dout_THD, out_THD, who.sequence_T, delta_TH, H=H, D=D, WIDE=wide, HEADS=DELTAS, num_warps=4
    )
    of_heads = (q_THD, dout_THD, lse_TH, delta_TH, dq_THD)
    some = pool if pool is not None and len(pool.values) else None
    tokens = lists(window, who, keep, some, count_T, picks_TK, most_entries)
    sums_RD = _of_rows(of_heads, window, some, who.sequence_T, tokens, scale, memory)
    pool_rows = len(sums_RD) - len(window.values)
    return (
        dq_THD,
        _placed(window, sums_RD[pool_rows:]),
        None if pool is None else _placed(pool, sums_RD[:pool_rows]),
        None if sinks_H is None else _of_sinks(sinks_H, lse_TH, delta_TH, who.sequence_T),
    )


def _of_rows(
    of_heads: tuple[Tensor, ...],
    window: Pages,
    pool: Pages | None,
    sequence_T: Tensor,
    tokens: Lists,
    scale: float,
    memory: int,
) -> Tensor:
    """float32 [R, D], of the rows of the pool and then of the window; fills dq, the last of `of_heads`."""
    q_THD, dout_THD, dq_THD = *of_heads[:2], of_heads[-1]
    (T, H, D), N = q_THD.shape, tokens.index_TN.shape[1]
    turn = max(1, min(T, memory // (N * (3 * q_THD.element_size() * H + 4 * D))))
    pool_rows = 0 if pool is None else len(pool.values)
    rows = pool_rows + len(window.values)
    order, starts = readers(tokens, turn, pool_rows, rows)
    p, ds, ds_of_q = (q_THD.new_empty(turn * N * H) for _ in range(3))
    parts = q_THD.new_empty(turn * N * D, dtype=torch.float32)
    sums_RD = q_THD.new_zeros(rows, D, dtype=torch.float32)
    other = window if pool is None else pool
    at = {"POOL_ROW": other.row, "WINDOW_ROW": window.row, "ROWS": ROWS}
    exact, wide = q_THD.dtype == torch.float32, max(16, triton.next_power_of_2(D))
    kind, read = (tl.float32, tl.float32) if exact else (tl.bfloat16, READ)
    across, columns = min(OF_QUERIES, wide), min(COLUMNS, wide)
    both, shape = (line(other), line(window)), (*strides(q_THD), H, D)
    for first in range(0, T, turn):
        these = min(turn, T - first)
        told = (tokens.blocks_T2, sequence_T, first, tokens.P, N)
        _probabilities[(these, triton.cdiv(H, ROWS))](
            q_THD, *both, *of_heads[1:-1], p, ds, ds_of_q, tokens.index_TN, *told, scale,
            scale * LOG2E, *shape, WIDE=wide, BLOCK=BLOCK, KEYS=KEYS, ROUND=kind, READ=read, **at,
            num_warps=4, num_stages=2,
        )  # fmt: skip
        _queries[(these * triton.cdiv(D, across), triton.cdiv(H, ROWS))](
            *both, ds_of_q, dq_THD, tokens.index_TN, *told, H, D, BLOCK=BLOCK, COLUMNS=across,
            READ=read, **at, num_warps=4, num_stages=2,
        )  # fmt: skip
        _parts[(these * (N // BLOCK) * triton.cdiv(D, columns),)](
            q_THD, dout_THD, p, ds, parts, *told, *shape, ROWS=ROWS, BLOCK=BLOCK, COLUMNS=columns,
            READ=read, num_warps=4, num_stages=1,
        )  # fmt: skip
        _summed[(rows,)](
            parts, order, starts, sums_RD, first // turn, first * N,
            D=D, WIDE=wide, READERS=READERS, num_warps=4,
        )  # fmt: skip
    return sums_RD


def _placed(pages: Pages, sums_RD: Tensor) -> Tensor:
    """The gradient of all values, of which the rows' are `sums_RD`, from the pages' start on; rounded once."""
    if pages.values.shape[1:] == sums_RD.shape[1:]:
        return sums_RD.to(pages.values.dtype)
    grad = torch.zeros_like(pages.values, memory_format=torch.contiguous_format)
    grad.flatten(1)[:, pages.start : pages.start + sums_RD.shape[1]] = sums_RD
    return grad


def _of_sinks(sinks_H: Tensor, lse_TH: Tensor, delta_TH: Tensor, sequence_T: Tensor) -> Tensor:
    """-sum_t p_sink delta. Where a sink outweighs all rows, delta is 0."""
    share_TH = torch.exp((sinks_H - lse_TH / LOG2E).clamp_max(0.0))
    parts_TH = (share_TH * delta_TH).masked_fill(sequence_T[:, None] < 0, 0.0)
    return -parts_TH.sum(0)  # a gradient
