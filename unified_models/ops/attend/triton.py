"""Attention over pages for any GPU that Triton knows: parts of a row, one for each split of its keys, and their sum.

Two kernels for every step. A tile's number of tokens follows the step; its rows' bits do not: each row meets the same
blocks of keys in the same order, on the instruction that multiplies bfloat16 alike in tiles of 16 and of 64 rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.narrow_triton import READ
from unified_models.ops.pages import Pages, Sequences

BLOCK = 64
"""Keys that are multiplied, maximised and summed at once, at absolute positions."""
SPLIT = 1024
"""Positions of one part of a row's sums, at absolute positions."""
WORKSPACE = 256 << 20
"""Bytes of parts that are kept at once; more tokens than that go in several turns."""
CORE_ROWS, FLOAT_ROWS = 64, 16
"""Of a tile, at most, unless a key head has more query heads: on tensor cores, where 16 rows have the same bits, and in
float32, where they would not."""
DEPTH = 32
"""Channels that float32 multiplies at once: no tensor core takes them, and a thread holds what it multiplies."""


@triton.jit
def _tile(tiles_ptr, tile, TILED: tl.constexpr):
    """The first token and the number of tokens; -1 and 0 where there is no such tile."""
    if TILED:
        return tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    else:
        return tile, 1


@triton.jit(do_not_specialize=["T"])
def _tiles(sequence_ptr, starts_ptr, tiles_ptr, T, TILE: tl.constexpr, WIDTH: tl.constexpr):
    """The j-th tile of sequence s, whose first token is t, has number floor(t / TILE) + s + j: n tokens are at most
    floor(n / TILE) + 1 tiles, so no two share a number, and some have no tile."""
    t = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    s = tl.load(sequence_ptr + t, mask=t < T, other=-1)
    first = tl.load(starts_ptr + s, mask=s >= 0, other=0)
    end = tl.load(starts_ptr + s + 1, mask=s >= 0, other=0)
    at = tiles_ptr + 2 * (first // TILE + s + (t - first) // TILE)
    opens = (s >= 0) & ((t - first) % TILE == 0)
    tl.store(at, t, mask=opens)
    tl.store(at + 1, tl.minimum(end - t, TILE), mask=opens)


@triton.jit
def _rows(
    values_ptr, table_ptr, scale_ptr, n0, there, d, inside,
    PER_PAGE: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr,
    BLOCK: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Channels d of the rows at positions n0 .. n0 + BLOCK - 1 as they are multiplied; zeros for those not `there`."""
    n = n0 + tl.arange(0, BLOCK)
    if PER_PAGE % BLOCK == 0:  # the whole block is in one page
        page = tl.load(table_ptr + n0 // PER_PAGE).to(tl.int64)
    else:
        page = tl.load(table_ptr + n // PER_PAGE, mask=there, other=0).to(tl.int64)
    at = page * PAGE + (n % PER_PAGE).to(tl.int64) * ROW
    x = tl.load(
        values_ptr + at[:, None] + d[None, :], mask=there[:, None] & inside[None, :], other=0.0
    )
    if CODED:
        # a code that is not there is 0, and no scale makes it NaN
        x = tl.where(there[:, None], x.to(tl.float32) * tl.load(scale_ptr), 0.0)
    return x.to(ROUND).to(READ)


@triton.jit
def _oldest(p, KEEP: tl.constexpr):
    """The first position that one at p sees."""
    if KEEP:
        return tl.maximum(p - KEEP + 1, 0)
    else:
        return p * 0


@triton.jit
def _queries(q_at, live, d, D: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr):
    """Channels d of the rows at q_at; zeros for those not live."""
    x = tl.load(q_at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    return x.to(ROUND).to(READ)


@triton.jit
def _scores(
    q, q_at, live, k_at, table, scale_ptr, n0, there,
    D: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr, PER_PAGE: tl.constexpr,
    PAGE: tl.constexpr, ROW: tl.constexpr, BLOCK: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """q . k of a block of keys; in pieces of DEPTH channels q is read again."""
    if DEPTH == WIDE:
        d = tl.arange(0, WIDE)
        k = _rows(
            k_at, table, scale_ptr, n0, there, d, d < D,
            PER_PAGE, PAGE, ROW, BLOCK, ROUND, READ, CODED,
        )  # fmt: skip
        return tl.dot(q, tl.trans(k), input_precision="ieee")
    else:
        out = tl.zeros((q.shape[0], BLOCK), dtype=tl.float32)
        for d0 in range(0, WIDE, DEPTH):
            d = d0 + tl.arange(0, DEPTH)
            k = _rows(
                k_at, table, scale_ptr, n0, there, d, d < D,
                PER_PAGE, PAGE, ROW, BLOCK, ROUND, READ, CODED,
            )  # fmt: skip
            part = _queries(q_at, live, d, D, ROUND, READ)
            out = tl.dot(part, tl.trans(k), out, input_precision="ieee")
        return out


@triton.jit
def _softmax(scores, top):
    """2^(s - m) with m the larger of `top` and the block's largest; m; and what earlier sums are multiplied by."""
    higher = tl.maximum(top, tl.max(scores, axis=1))
    pivot = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet: not -inf - -inf
    return tl.exp2(scores - pivot[:, None]), higher, tl.exp2(top - pivot)


@triton.jit(do_not_specialize=["first_tile", "k_width", "v_width", "slots"])
def _parts(
    q_ptr, k_ptr, v_ptr, k_table_ptr, v_table_ptr, k_scale_ptr, v_scale_ptr,
    sequence_ptr, position_ptr, tiles_ptr, top_ptr, total_ptr, acc_ptr,
    first_tile, k_width, v_width, slots, factor,
    STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr, H: tl.constexpr, EACH: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr, PER_PAGE: tl.constexpr,
    PAGE: tl.constexpr, ROW: tl.constexpr, TILE: tl.constexpr, TILED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLIT: tl.constexpr, DEPTH: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr, CODED: tl.constexpr,
):  # fmt: skip
    """Of TILE tokens' query heads of one key head and one split: the largest score m, sum_n 2^(s_n - m), and
    sum_n 2^(s_n - m) v_n, blocks of keys ascending. KEEP: 0 for all."""
    token, count = _tile(tiles_ptr, first_tile + tl.program_id(0), TILED)
    s = tl.load(sequence_ptr + token, mask=token >= 0, other=-1)
    if s < 0:
        return
    begin = tl.load(position_ptr + token)
    low = _oldest(begin, KEEP)
    split = low // SPLIT + tl.program_id(2)
    start = tl.maximum(split * SPLIT, low // BLOCK * BLOCK)
    end = tl.minimum(begin + count, split * SPLIT + SPLIT)
    if start >= end:
        return
    row, d, g = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.program_id(1)
    h = g * EACH + row % EACH
    live = row // EACH < count
    p = begin + row // EACH
    oldest = _oldest(p, KEEP)
    q_at = q_ptr + (token + row // EACH).to(tl.int64) * STRIDE_T + h * STRIDE_H
    k_table = k_table_ptr + s.to(tl.int64) * k_width
    v_table = v_table_ptr + s.to(tl.int64) * v_width
    q = _queries(q_at, live, d, D, ROUND, READ)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    for n0 in range(start, end, BLOCK):
        n = n0 + tl.arange(0, BLOCK)
        there = (n >= low) & (n < end)
        scores = _scores(
            q, q_at, live, k_ptr + g * D, k_table, k_scale_ptr, n0, there,
            D, WIDE, DEPTH, PER_PAGE, PAGE, ROW, BLOCK, ROUND, READ, CODED,
        )  # fmt: skip
        seen = (n[None, :] >= oldest[:, None]) & (n[None, :] <= p[:, None])
        e, top, fade = _softmax(tl.where(seen, scores * factor, float("-inf")), top)
        total = total * fade + tl.sum(e, axis=1)
        v = _rows(
            v_ptr + g * D, v_table, v_scale_ptr, n0, there, d, d < D,
            PER_PAGE, PAGE, ROW, BLOCK, ROUND, READ, CODED,
        )  # fmt: skip
        acc = tl.dot(e.to(ROUND).to(READ), v, acc * fade[:, None], input_precision="ieee")
    slot = split - oldest // SPLIT
    write = live & (slot >= 0) & (slot < slots) & (split <= p // SPLIT)
    at = ((tl.program_id(0) * TILE + row // EACH).to(tl.int64) * H + h) * slots + slot
    tl.store(top_ptr + at, top, mask=write)
    tl.store(total_ptr + at, total, mask=write)
    tl.store(acc_ptr + at[:, None] * D + d[None, :], acc, mask=write[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["first_tile", "slots"])
def _joined(
    top_ptr, total_ptr, acc_ptr, sequence_ptr, position_ptr, tiles_ptr, out_ptr, lse_ptr,
    first_tile, slots, H: tl.constexpr, EACH: tl.constexpr, HEADS: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr, TILE: tl.constexpr,
    TILED: tl.constexpr, SPLIT: tl.constexpr, TOLD: tl.constexpr,
):  # fmt: skip
    """A token's parts, splits ascending, each times 2^(its m - the largest m); one division. 0 for padding.
    TOLD: and log2 of the sum that divides, whose terms are 2^s."""
    i = tl.program_id(0)
    first, count = _tile(tiles_ptr, first_tile + i // TILE, TILED)
    token = first + i % TILE
    if (first < 0) | (i % TILE >= count):
        return
    s = tl.load(sequence_ptr + token)
    p = tl.load(position_ptr + token)
    parts = tl.minimum(p // SPLIT - _oldest(p, KEEP) // SPLIT + 1, slots)
    parts = tl.where(s < 0, 0, parts)
    each = tl.arange(0, HEADS)
    d = tl.arange(0, WIDE)
    h = tl.program_id(1) * EACH + each
    mine = each < EACH
    both = mine[:, None] & (d < D)[None, :]
    at = (i.to(tl.int64) * H + h) * slots
    top = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    for z in range(parts):
        top = tl.maximum(top, tl.load(top_ptr + at + z, mask=mine, other=0.0))
    total = tl.zeros((HEADS,), dtype=tl.float32)
    acc = tl.zeros((HEADS, WIDE), dtype=tl.float32)
    for z in range(parts):
        share = tl.exp2(tl.load(top_ptr + at + z, mask=mine, other=0.0) - top)
        total += share * tl.load(total_ptr + at + z, mask=mine, other=0.0)
        part = tl.load(acc_ptr + (at + z)[:, None] * D + d[None, :], mask=both, other=0.0)
        acc += share[:, None] * part
    total = tl.where(mine & (parts > 0), total, 1.0)
    if TOLD:
        tl.store(lse_ptr + token.to(tl.int64) * H + h, top + tl.log2(total), mask=mine)
    # the sign of a zero could tell how many empty blocks a tile had
    acc = tl.where(acc == 0.0, 0.0, acc)
    out = tl.div_rn(acc, tl.broadcast_to(total[:, None], (HEADS, WIDE)))
    to = (token.to(tl.int64) * H + h)[:, None] * D + d[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=both)


def attend(
    q_THD: Tensor,
    k: Pages,
    v: Pages,
    who: Sequences,
    *,
    scale: float,
    keep: int | None,
    groups: int,
    most: int,
    scales: tuple[Tensor, Tensor] | None = None,
    lse_TH: Tensor | None = None,
    tile: int | None = None,
    split: int = SPLIT,
    memory: int = WORKSPACE,
) -> Tensor:
    """ops.attend_pages, forward only. lse_TH: float32, filled with log2 sum_n 2^(scale log2(e) q . k_n) of each token
    that has a sequence; the output's bits are the same without it.

    For tests: tile, tokens of a tile; split, positions of a part of the sums (its bits are its own); memory, bytes of
    parts at once."""
    (T, H, D), each = q_THD.shape, q_THD.shape[1] // groups
    cores = q_THD.dtype == torch.bfloat16 and k.values.dtype != torch.float32
    tile = tile or tile_of(T, len(who.past_S), each, cores)
    tiles = None if tile == 1 else tile_list(who, T, tile)
    splits = max(1, triton.cdiv(most, split))
    slots = splits if keep is None else min(splits, triton.cdiv(keep - 1, split) + 1)
    spans = splits if keep is None else min(splits, triton.cdiv(keep + tile - 2, split) + 1)
    out = torch.empty_like if tiles is None else torch.zeros_like
    out_THD = out(q_THD, memory_format=torch.contiguous_format)
    number = T if tiles is None else len(tiles)
    turn = max(1, min(number, memory // (4 * tile * H * slots * (D + 2))))
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    top, total = (q_THD.new_empty(turn * tile * H * slots, dtype=torch.float32) for _ in "mt")
    acc = q_THD.new_empty(turn * tile * H * slots * D, dtype=torch.float32)
    tables = [pages.table_SK.contiguous() for pages in (k, v)]
    shape = {
        "H": H, "EACH": each, "D": D, "WIDE": max(16, triton.next_power_of_2(D)),
        "KEEP": keep or 0, "TILE": tile, "TILED": tiles is not None, "SPLIT": split,
    }  # fmt: skip
    for first in range(0, number, turn):
        these = min(turn, number - first)
        _parts[(these, groups, spans)](
            q_THD, line(k), line(v), *tables, *(scales or (None, None)), who.sequence_T,
            who.position_T, tiles, top, total, acc, first, tables[0].shape[1], tables[1].shape[1],
            slots, scale * math.log2(math.e), *strides(q_THD), **shape,
            PER_PAGE=k.per_page, PAGE=k.page, ROW=k.row, BLOCK=BLOCK, CODED=scales is not None,
            **launch(tile * each, D, cores, scales is not None),
        )  # fmt: skip
        _joined[(these * tile, groups)](
            top, total, acc, who.sequence_T, who.position_T, tiles, out_THD, lse_TH,
            first, slots, HEADS=triton.next_power_of_2(each), **shape, TOLD=lse_TH is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_THD


def tile_of(tokens: int, sequences: int, each: int, cores: bool) -> int:
    """Tokens that share a tile and the keys it reads: several, unless most sequences bring one."""
    if tokens <= 2 * sequences:
        return 1
    return max(1, (CORE_ROWS if cores else FLOAT_ROWS) // each)


def tile_list(who: Sequences, tokens: int, tile: int) -> Tensor:
    """int32 [V, 2]: the first token of a tile and how many it has, all of one sequence; -1 where there is none."""
    number = tokens // tile + len(who.past_S)
    tiles = torch.full((number, 2), -1, dtype=torch.int32, device=who.sequence_T.device)
    if tokens:
        _tiles[(triton.cdiv(tokens, 256),)](
            who.sequence_T, who.starts_S1, tiles, tokens, tile, 256, num_warps=4
        )
    return tiles


def launch(rows: int, D: int, cores: bool, coded: bool) -> dict[str, object]:
    """The shape of a tile's rows and its warps: one warp or four, and each row always within one of them, so that its
    maxima and sums are trees of one shape.

    Sums are not fused into products: each step is rounded as it is written, in every tile.
    """
    wide = max(16, triton.next_power_of_2(D))
    if not cores:
        full = max(FLOAT_ROWS, triton.next_power_of_2(rows))
        depth, warps, stages, dtypes = min(DEPTH, wide), 4, 1, (tl.float32, tl.float32)
    else:
        # What came from bytes is taken in another order by the instruction for 16 rows than by the one for 64 (H200).
        full = 16 if rows <= 16 and not coded else max(CORE_ROWS, triton.next_power_of_2(rows))
        depth, warps, dtypes = wide, 1 if full == 16 else 4, (tl.bfloat16, READ)
        stages = 3 if wide <= 128 else 2
    return {
        "ROWS": full, "DEPTH": depth, "ROUND": dtypes[0], "READ": dtypes[1],
        "num_warps": warps, "num_stages": stages, "enable_fp_fusion": False,
    }  # fmt: skip


def line(pages: Pages) -> Tensor:
    """The memory of the pages from `start` on, as one line; bytes are e4m3 codes."""
    values = pages.values
    if values.dtype == torch.uint8:
        values = values.view(torch.float8_e4m3fn)
    return values.as_strided((1,), (1,), values.storage_offset() + pages.start)


def strides(q_THD: Tensor) -> tuple[int, int]:
    """Of tokens and heads; those of a single token are said as if it had neighbours."""
    T, H, D = q_THD.shape
    return (q_THD.stride(0) if T > 1 else H * D), (q_THD.stride(1) if H > 1 else D)
