"""Latent attention over pages for any GPU that Triton knows: parts of a token, one for each split of its list, and
their sum. Two kernels for every step, with one tiling: a token, 64 of its heads, and the rows that its list names."""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.narrow_triton import READ
from unified_models.ops.pages import Pages, Sequences

SPLIT = 512
"""List places of one part of a token's sums. The window is a part of its own, whatever its length."""
WORKSPACE = 256 << 20
"""Bytes of parts that are kept at once; more tokens than that go in several turns."""
GROUP = 64
"""Channels that share a scale in a record; its unscaled channels are as many at most."""
DEPTH = 32
"""Channels that float32 multiplies at once: no tensor core takes them, and a thread holds what it multiplies."""
JOINED = 8
"""Heads whose parts are added by one program."""
ALIGN = 64
"""The window's blocks begin at multiples of so many positions."""
WARPS = 8
LOG2E = math.log2(math.e)
VARYING = (
    "first", "width", "window_width", "pool_width", "window_start", "pool_start", "slots",
)  # fmt: skip


@triton.jit
def _numbers(
    picks_at, n0, low, end, picks,
    BLOCK: tl.constexpr, COPIES: tl.constexpr, PICKED: tl.constexpr,
):  # fmt: skip
    """Which rows list places n0 .. n0 + BLOCK - 1 name, -1 for none. A place below `picks` is a pick, another names
    itself.

    COPIES: a thread for each, or the compiler would have every thread work out every row that it loads of.
    """
    place = n0 + tl.arange(0, BLOCK)[:, None] + tl.zeros((BLOCK, COPIES), dtype=tl.int32)
    there = (place >= low) & (place < end)
    n = place
    if PICKED:
        picked = tl.load(picks_at + place, mask=there & (place < picks), other=-1).to(tl.int32)
        n = tl.where(place < picks, picked, place)
    return tl.where(there & (n >= 0), n, -1)


@triton.jit
def _pages(table_at, n, per_page, ring):
    """The page of each row, and its place there, -1 for none."""
    some = tl.maximum(n, 0)
    number = tl.load(table_at + some // per_page, mask=n >= 0, other=0)
    return number, tl.where(n >= 0, some % per_page % ring, -1)


@triton.jit
def _places(number, place, page, row, start):
    """Where the rows begin, in lanes; -1 where there is none."""
    at = start + number.to(tl.int64) * page + place.to(tl.int64) * row
    return tl.max(tl.where(place >= 0, at, -1), axis=1)


@triton.jit
def _plain(values_ptr, at, d, D: tl.constexpr, LANE: tl.constexpr):
    """Channels d of the rows at `at`; zeros where there is none."""
    there = (at >= 0)[:, None] & (d < D)[None, :]
    return tl.load(values_ptr + (at * LANE)[:, None] + d[None, :], mask=there, other=0.0)


@triton.jit
def _record(
    values_ptr, at, D: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, LANE: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The rows of formats.LatentFP8 at `at`, bfloat16; zeros where there is none."""
    NOPE: tl.constexpr = D - ROPE
    GROUPS: tl.constexpr = WIDE // GROUP
    SCALES: tl.constexpr = NOPE + 2 * ROPE
    there, begin = (at >= 0)[:, None], (at * LANE)[:, None]
    d, g, r = tl.arange(0, WIDE), tl.arange(0, GROUPS), tl.arange(0, GROUP)
    codes_ptr = values_ptr.to(tl.pointer_type(tl.float8e4nv), bitcast=True)
    codes = tl.load(codes_ptr + begin + d[None, :], mask=there & (d < NOPE)[None, :], other=0.0)
    inside = there & (g < NOPE // GROUP + 1)[None, :]  # with the pad byte: then it is eight
    scale = tl.load(values_ptr + begin + SCALES + g[None, :], mask=inside, other=0).to(tl.int32)
    scale = tl.where(scale == 0, 1 << 22, scale << 23).to(tl.float32, bitcast=True)
    rotated = g == NOPE // GROUP
    scale = tl.where(rotated[None, :], 1.0, scale)
    inside = there & (r < ROPE)[None, :]
    if LANE % 2 == 0:
        rope_ptr = values_ptr.to(tl.pointer_type(tl.bfloat16), bitcast=True)
        rope_at = (at * (LANE // 2))[:, None] + NOPE // 2 + r[None, :]
        rope = tl.load(rope_ptr + rope_at, mask=inside, other=0.0)
    else:
        rope_at = values_ptr + begin + NOPE + 2 * r[None, :]
        low = tl.load(rope_at, mask=inside, other=0).to(tl.uint16)
        high = tl.load(rope_at + 1, mask=inside, other=0).to(tl.uint16)
        rope = (low | (high << 8)).to(tl.bfloat16, bitcast=True)
    x = tl.reshape(codes.to(tl.float32), (BLOCK, GROUPS, GROUP))
    # before the product: then two values are rounded by one instruction
    x = tl.where(rotated[None, :, None], rope.to(tl.float32)[:, None, :], x) * scale[:, :, None]
    return tl.reshape(x.to(tl.bfloat16), (BLOCK, WIDE))


@triton.jit
def _rows(
    values_ptr, at, D: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, LANE: tl.constexpr,
    BLOCK: tl.constexpr, GROUP: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Whole rows as they are multiplied. ROPE: 0 where they are no records."""
    if ROPE:
        x = _record(values_ptr, at, D, WIDE, ROPE, LANE, BLOCK, GROUP)
    else:
        x = _plain(values_ptr, at, tl.arange(0, WIDE), D, LANE)
    return x.to(ROUND).to(READ)


@triton.jit
def _queries(q_at, live, d, D: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr):
    """Channels d of the rows at q_at; zeros for those not live."""
    x = tl.load(q_at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    return x.to(ROUND).to(READ)


@triton.jit
def _scores(
    q, q_at, live, rows, values_ptr, at, D: tl.constexpr, WIDE: tl.constexpr, DEPTH: tl.constexpr,
    LANE: tl.constexpr, BLOCK: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """q . row of a block; in pieces of DEPTH channels both are read again."""
    if DEPTH == WIDE:
        return tl.dot(q, tl.trans(rows), input_precision="ieee")
    else:
        out = tl.zeros((q_at.shape[0], BLOCK), dtype=tl.float32)
        for d0 in range(0, WIDE, DEPTH):
            d = d0 + tl.arange(0, DEPTH)
            part = _plain(values_ptr, at, d, D, LANE).to(ROUND).to(READ)
            of_q = _queries(q_at, live, d, D, ROUND, READ)
            out = tl.dot(of_q, tl.trans(part), out, input_precision="ieee")
        return out


@triton.jit
def _ends(picks_at, count_ptr, token, width, start, SPLIT: tl.constexpr, PICKED: tl.constexpr):
    """Of the pool's list places start .. start + SPLIT - 1: the place behind the last with a row, start or less where
    there is none; and behind the last pick."""
    if PICKED:
        place = start + tl.arange(0, SPLIT)
        picked = tl.load(picks_at + place, mask=place < width, other=-1)
        end = tl.max(tl.where(picked >= 0, place + 1, start), axis=0)
        return end, end
    else:
        return tl.minimum(tl.load(count_ptr + token).to(tl.int32), start + SPLIT), start * 0


@triton.jit
def _sums(
    q_at, live, values_ptr, picks_at, table_at, start, low, end, picks,
    per_page, page, row, begin, ring, factor,
    D: tl.constexpr, WIDE: tl.constexpr, ROPE: tl.constexpr, LANE: tl.constexpr,
    PICKED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COPIES: tl.constexpr,
    GROUP: tl.constexpr, DEPTH: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """The largest score m, sum_n 2^(s_n - m), and sum_n 2^(s_n - m) row_n, blocks of list places ascending."""
    q = _queries(q_at, live, tl.arange(0, WIDE), D, ROUND, READ)
    top = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    acc = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    # numbers are two blocks ahead and pages one, so that no row waits for them
    n = _numbers(picks_at, start, low, end, picks, BLOCK, COPIES, PICKED)
    number, place = _pages(table_at, n, per_page, ring)
    n = _numbers(picks_at, start + BLOCK, low, end, picks, BLOCK, COPIES, PICKED)
    for n0 in range(start, end, BLOCK):
        at = _places(number, place, page, row, begin)
        rows = _rows(values_ptr, at, D, WIDE, ROPE, LANE, BLOCK, GROUP, ROUND, READ)
        number, place = _pages(table_at, n, per_page, ring)
        n = _numbers(picks_at, n0 + 2 * BLOCK, low, end, picks, BLOCK, COPIES, PICKED)
        scores = _scores(
            q, q_at, live, rows, values_ptr, at, D, WIDE, DEPTH, LANE, BLOCK, ROUND, READ
        )
        scores = tl.where((at >= 0)[None, :], scores * factor, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        pivot = tl.where(higher == float("-inf"), 0.0, higher)  # no row yet: not -inf - -inf
        e, fade, top = tl.exp2(scores - pivot[:, None]), tl.exp2(top - pivot), higher
        total = total * fade + tl.sum(e, axis=1)
        acc = tl.dot(e.to(ROUND).to(READ), rows, acc * fade[:, None], input_precision="ieee")
    return top, total, acc


@triton.jit(do_not_specialize=VARYING)
def _parts(
    q_ptr, window_ptr, pool_ptr, window_table_ptr, pool_table_ptr, picks_ptr, count_ptr,
    sequence_ptr, position_ptr, top_ptr, total_ptr, acc_ptr,
    first, width, window_width, pool_width, window_start, pool_start, slots, factor,
    STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    WIDE: tl.constexpr, ROPE: tl.constexpr, KEEP: tl.constexpr, LANE: tl.constexpr,
    WINDOW_PER: tl.constexpr, WINDOW_PAGE: tl.constexpr, WINDOW_ROW: tl.constexpr,
    WINDOW_RING: tl.constexpr, POOL_PER: tl.constexpr, POOL_PAGE: tl.constexpr,
    POOL_ROW: tl.constexpr, POOL_RING: tl.constexpr, PICKED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, COPIES: tl.constexpr, ALIGN: tl.constexpr,
    SPLIT: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """`_sums` of ROWS heads of a token and one split, the last slot being the window's. One without rows has m = -inf,
    and no third."""
    i, z = tl.program_id(0), tl.program_id(2)
    token = first + i
    s = tl.load(sequence_ptr + token)
    if s < 0:
        return
    p = tl.load(position_ptr + token)
    low = tl.maximum(p - KEEP + 1, 0)
    start, end = low // ALIGN * ALIGN, p + 1
    picks = 0
    values_ptr = window_ptr
    table_at = window_table_ptr + s.to(tl.int64) * window_width
    picks_at = table_at
    per_page, ring, page, row = WINDOW_PER, WINDOW_RING, WINDOW_PAGE, WINDOW_ROW
    begin = window_start
    if POOL_PER:
        listed = z < slots - 1
        values_ptr = tl.where(listed, pool_ptr, window_ptr)
        table_at = tl.where(listed, pool_table_ptr + s.to(tl.int64) * pool_width, table_at)
        per_page = tl.where(listed, POOL_PER, WINDOW_PER)
        page, row = tl.where(listed, POOL_PAGE, WINDOW_PAGE), tl.where(listed, POOL_ROW, WINDOW_ROW)
        begin = tl.where(listed, pool_start, window_start)
        ring = tl.where(listed, POOL_RING, WINDOW_RING)
        if PICKED:
            picks_at = picks_ptr + token.to(tl.int64) * width
        if listed:
            start, low = z * SPLIT, z * SPLIT
            end, picks = _ends(picks_at, count_ptr, token, width, start, SPLIT, PICKED)
    h, d = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, WIDE)
    live = h < H
    to = (i.to(tl.int64) * H + h) * slots + z
    if start < end:
        q_at = q_ptr + token.to(tl.int64) * STRIDE_T + h * STRIDE_H
        top, total, acc = _sums(
            q_at, live, values_ptr, picks_at, table_at, start, low, end, picks,
            per_page, page, row, begin, ring, factor, D, WIDE, ROPE, LANE,
            PICKED, ROWS, BLOCK, COPIES, GROUP, DEPTH, ROUND, READ,
        )  # fmt: skip
        tl.store(top_ptr + to, top, mask=live)
        tl.store(total_ptr + to, total, mask=live)
        both = live[:, None] & (d < D)[None, :]
        tl.store(acc_ptr + to[:, None] * D + d[None, :], acc, mask=both)
    else:
        tl.store(top_ptr + to, float("-inf"), mask=live)
        tl.store(total_ptr + to, 0.0, mask=live)


@triton.jit(do_not_specialize=["first", "slots"])
def _joined(
    top_ptr, total_ptr, acc_ptr, sinks_ptr, sequence_ptr, out_ptr, lse_ptr, first, slots, log2e,
    H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, HEADS: tl.constexpr,
    SINKS: tl.constexpr, TOLD: tl.constexpr,
):  # fmt: skip
    """A token's parts, splits ascending, each times 2^(its m - the largest m); the sink joins the denominator last; one
    division. 0 for padding. TOLD: and log2 of the denominator, whose terms are 2^s."""
    i = tl.program_id(0)
    token = first + i
    parts = tl.where(tl.load(sequence_ptr + token) < 0, 0, slots)
    h, d = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDE)
    live = h < H
    at = (i.to(tl.int64) * H + h) * slots
    top = tl.full((HEADS,), float("-inf"), dtype=tl.float32)
    for z in range(parts):
        top = tl.maximum(top, tl.load(top_ptr + at + z, mask=live, other=0.0))
    total = tl.zeros((HEADS,), dtype=tl.float32)
    acc = tl.zeros((HEADS, WIDE), dtype=tl.float32)
    for z in range(parts):
        its = tl.load(top_ptr + at + z, mask=live, other=0.0)
        there = live & (its != float("-inf"))  # a NaN is
        share = tl.where(there, tl.exp2(its - top), 0.0)
        total += share * tl.load(total_ptr + at + z, mask=there, other=0.0)
        both = there[:, None] & (d < D)[None, :]
        part = tl.load(acc_ptr + (at + z)[:, None] * D + d[None, :], mask=both, other=0.0)
        acc += share[:, None] * part
    if SINKS:
        total += tl.exp2(tl.load(sinks_ptr + h, mask=live, other=0.0) * log2e - top)
    total = tl.where(live & (parts > 0), total, 1.0)
    if TOLD:
        tl.store(lse_ptr + token.to(tl.int64) * H + h, top + tl.log2(total), mask=live)
    out = tl.div_rn(acc, tl.broadcast_to(total[:, None], (HEADS, WIDE)))
    to = (token.to(tl.int64) * H + h)[:, None] * D + d[None, :]
    both = live[:, None] & (d < D)[None, :]
    tl.store(out_ptr + to, out.to(out_ptr.dtype.element_ty), mask=both)


def attend_latent(
    q_THD: Tensor,
    window: Pages,
    who: Sequences,
    *,
    scale: float,
    keep: int,
    sinks_H: Tensor | None = None,
    pool: Pages | None = None,
    count_T: Tensor | None = None,
    picks_TK: Tensor | None = None,
    most_entries: int = 0,
    rope: int = 0,
    lse_TH: Tensor | None = None,
    split: int = SPLIT,
    memory: int = WORKSPACE,
) -> Tensor:
    """ops.attend_latent_pages, forward only. rope: 0 where rows are plain. lse_TH: float32, filled with log2 of the
    denominator, of terms 2^(scale log2(e) q . row), -inf for padding; the output's bits are the same without it. For
    tests: split, list places of a part of the sums (its bits are its own); memory, bytes of parts at once."""
    T, H, D = q_THD.shape
    places = most_entries if picks_TK is None else picks_TK.shape[1]
    slots = 1 + (0 if pool is None else triton.cdiv(places, split))
    if slots == 1:
        pool = count_T = picks_TK = None
    if picks_TK is not None:
        picks_TK, count_T = picks_TK.contiguous(), None
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    out_THD = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
    turn = max(1, min(T, memory // (4 * H * slots * (D + 2))))
    top, total = (q_THD.new_empty(turn * H * slots, dtype=torch.float32) for _ in "mt")
    acc = q_THD.new_empty(turn * H * slots * D, dtype=torch.float32)
    cores = q_THD.dtype == torch.bfloat16 and window.values.dtype != torch.float32
    wide = triton.next_power_of_2(max(16, D, D - rope + GROUP if rope else 0))
    at, starts = addresses(window, pool)
    how = launch(wide, cores, rope > 0)
    tables = [None if one is None else one.table_SK.contiguous() for one in (window, pool)]
    widths = [0 if x is None else x.shape[1] for x in (picks_TK, *tables)]
    for first in range(0, T, turn):
        these = min(turn, T - first)
        _parts[(these, triton.cdiv(H, how["ROWS"]), slots)](
            q_THD, window.values, pool and pool.values, *tables, picks_TK, count_T,
            who.sequence_T, who.position_T, top, total, acc,
            first, *widths, *starts, slots, scale * LOG2E, *strides(q_THD),
            H=H, D=D, WIDE=wide, ROPE=rope, KEEP=keep, PICKED=picks_TK is not None, SPLIT=split,
            GROUP=GROUP, **at, **how,
        )  # fmt: skip
        _joined[(these, triton.cdiv(H, JOINED))](
            top, total, acc, sinks_H, who.sequence_T, out_THD, lse_TH, first, slots, LOG2E,
            H=H, D=D, WIDE=wide, HEADS=JOINED, SINKS=sinks_H is not None, TOLD=lse_TH is not None,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_THD


def addresses(window: Pages, pool: Pages | None) -> tuple[dict[str, int], tuple[int, int]]:
    """Where rows lie, in lanes of both: as many bytes, up to 16, as every row begins at a multiple of, so that a thread
    loads them at once. And the starts of both, which may differ from layer to layer."""
    size = window.values.element_size()
    both = [pages for pages in (window, pool) if pages is not None]
    steps = [size * n for pages in both for n in (pages.page, pages.row, pages.start)]
    lane = math.gcd(16, *steps, *(pages.values.data_ptr() for pages in both)) // size
    at = {"LANE": lane, "POOL_PER": 0, "POOL_PAGE": 0, "POOL_ROW": 0, "POOL_RING": 0}
    for name, pages in zip(("WINDOW", "POOL"), both, strict=False):
        at |= {
            f"{name}_PER": pages.per_page, f"{name}_PAGE": pages.page // lane,
            f"{name}_ROW": pages.row // lane, f"{name}_RING": pages.ring,
        }  # fmt: skip
    return at, (window.start // lane, 0 if pool is None else pool.start // lane)


def launch(wide: int, cores: bool, record: bool) -> dict[str, Any]:
    """The tile of rows of heads by list places, and its warps: one for all calls, so that each row's maxima and sums
    are trees of one shape. 64 heads: what came from bytes must meet the same instruction as what did not (H200).

    Sums are not fused into products: each step is rounded as it is written.
    """
    if cores:
        rows, block, depth, stages, dtypes = 64, 64, wide, 3 if record else 2, (tl.bfloat16, READ)
    else:
        rows, block, stages, dtypes = 16, 16, 1, (tl.float32, tl.float32)
        depth = min(DEPTH, wide)
    return {
        "ROWS": rows, "BLOCK": block, "COPIES": 32 * WARPS // block, "ALIGN": ALIGN,
        "DEPTH": depth, "ROUND": dtypes[0], "READ": dtypes[1],
        "num_warps": WARPS, "num_stages": stages, "enable_fp_fusion": False,
    }  # fmt: skip


def strides(q_THD: Tensor) -> tuple[int, int]:
    """Of tokens and heads; those of a single token are said as if it had neighbours."""
    T, H, D = q_THD.shape
    return (q_THD.stride(0) if T > 1 else H * D), (q_THD.stride(1) if H > 1 else D)
