"""Gradients of attention over flat rows, for any GPU that Triton knows (Dao 2023, FlashAttention-2).

Two kernels, one over tiles of query rows and one over tiles of keys, each of which computes the probabilities again
from the log-sum-exp that the forward kept. No sum is an atomic one: the order of each follows from shapes.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.attend.triton import line, strides, tile_list
from unified_models.ops.linear.narrow_triton import READ
from unified_models.ops.pages import Pages, Sequences

Tile = tuple[int, int, int, int]
"""Query rows and keys that are multiplied at once, warps, stages."""
QUERY_TILES: dict[int, Tile] = {64: (128, 64, 8, 3), 128: (128, 64, 8, 3), 256: (64, 32, 4, 2)}
KEY_TILES: dict[int, Tile] = {64: (64, 128, 8, 3), 128: (64, 128, 8, 2), 256: (32, 64, 8, 2)}
"""By the width of a head, at most."""
PROGRAMS = 1024
"""Over keys, from which on each takes all heads of its group: some eight for each multiprocessor of an H200."""
PARTS = (1, 2, 4)
"""Into which the heads of a group are cut where there would be fewer."""


def takes(q_THD: Tensor, rows: Tensor) -> bool:
    """Whether these kernels have a tile for such rows."""
    cores = q_THD.dtype == rows.dtype == torch.bfloat16
    return cores and q_THD.shape[-1] <= max(QUERY_TILES)


@triton.jit
def _read(at, live, d, D: tl.constexpr, READ: tl.constexpr):
    """Channels d of the rows at `at`; zeros for those not live."""
    if d.shape[0] == D:
        x = tl.load(at[:, None] + d[None, :], mask=live[:, None], other=0.0)
    else:
        x = tl.load(at[:, None] + d[None, :], mask=live[:, None] & (d < D)[None, :], other=0.0)
    return x.to(READ)


@triton.jit
def _extent(starts_ptr, past_ptr, s, there, KEEP: tl.constexpr):
    """The first position that a token of sequence s in this step sees, and the number of positions from there on; 0
    for a sequence that has no token."""
    start = tl.load(starts_ptr + s, mask=there, other=0)
    end = tl.load(starts_ptr + s + 1, mask=there, other=0)
    past = tl.load(past_ptr + s, mask=there, other=0)
    if KEEP:
        first = tl.maximum(past - KEEP + 1, 0)
    else:
        first = past * 0
    return first, tl.where(end > start, past + end - start - first, 0)


@triton.jit
def _key_tiles(
    starts_ptr, past_ptr, tiles_ptr, KEEP: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """A sequence's tiles, its number and their first positions, behind those of the sequences before it."""
    mine = tl.program_id(0)
    before = tl.zeros((WIDTH,), dtype=tl.int32)
    for s0 in range(0, mine, WIDTH):
        s = s0 + tl.arange(0, WIDTH)
        _, count = _extent(starts_ptr, past_ptr, s, s < mine, KEEP)
        before += (count + KEYS - 1) // KEYS
    first, count = _extent(starts_ptr, past_ptr, mine, mine >= 0, KEEP)
    number = (count + KEYS - 1) // KEYS
    at = tiles_ptr + 2 * tl.sum(before)  # a count
    for j0 in range(0, number, WIDTH):
        j = j0 + tl.arange(0, WIDTH)
        tl.store(at + 2 * j, mine, mask=j < number)
        tl.store(at + 2 * j + 1, first + j * KEYS, mask=j < number)


@triton.jit
def _to_queries(
    dq, q, dout, lse, delta, p, k_at, v_at, n0, end, factor, d,
    D: tl.constexpr, KEEP: tl.constexpr, ROW: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """dq and what a block of keys adds to it. Not MASKED: every key is there, and every row sees it."""
    n = n0 + tl.arange(0, KEYS)
    there = n < end
    at = n.to(tl.int64) * ROW
    k = _read(k_at + at, there, d, D, READ)
    v = _read(v_at + at, there, d, D, READ)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    probability = tl.exp2(scores * factor - lse[:, None])
    if MASKED:
        seen = n[None, :] <= p[:, None]
        if KEEP:
            seen = seen & (n[None, :] > p[:, None] - KEEP)
        probability = tl.where(seen, probability, 0.0)
    dprobability = tl.dot(dout, tl.trans(v), input_precision="ieee")
    dscores = probability * (dprobability - delta[:, None])
    return tl.dot(dscores.to(ROUND).to(READ), k, dq, input_precision="ieee")


@triton.jit(do_not_specialize=["number", "width"])
def _queries(
    q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr,
    table_ptr, sequence_ptr, position_ptr, tiles_ptr, number, width, scale, factor,
    STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr, H: tl.constexpr, EACH: tl.constexpr,
    D: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Of a tile's tokens and the query heads of one key head: dq, keys ascending, and delta = do . o for `_keys`."""
    GROUPS: tl.constexpr = H // EACH
    tile = number - 1 - tl.program_id(0) // GROUPS  # those that see most keys are behind, and begin
    token, count = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    s = tl.load(sequence_ptr + token, mask=token >= 0, other=-1)
    if s < 0:
        return
    begin = tl.load(position_ptr + token)
    row, d, g = tl.arange(0, ROWS), tl.arange(0, WIDE), tl.program_id(0) % GROUPS
    h = g * EACH + row % EACH
    live = row // EACH < count
    p, t = begin + row // EACH, (token + row // EACH).to(tl.int64)
    at = (t * H + h) * D
    q = _read(q_ptr + t * STRIDE_T + h * STRIDE_H, live, d, D, READ)
    dout = _read(dout_ptr + at, live, d, D, READ)
    out = _read(out_ptr + at, live, d, D, READ)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)  # a gradient
    tl.store(delta_ptr + t * H + h, delta, mask=live)
    lse = tl.load(lse_ptr + t * H + h, mask=live, other=float("inf"))
    base = tl.load(table_ptr + s.to(tl.int64) * width).to(tl.int64) * ROW + g * D
    k_at, v_at = k_ptr + base, v_ptr + base
    low, end = begin * 0, begin + count
    clear = (begin + 1) // KEYS * KEYS
    if KEEP:
        low = tl.maximum(begin - KEEP + 1, 0)
        clear = low
    dq = tl.zeros((ROWS, WIDE), dtype=tl.float32)
    for n0 in range(low, clear, KEYS):
        dq = _to_queries(
            dq, q, dout, lse, delta, p, k_at, v_at, n0, end, factor, d,
            D, KEEP, ROW, KEYS, False, ROUND, READ,
        )  # fmt: skip
    for n0 in range(clear, end, KEYS):
        dq = _to_queries(
            dq, q, dout, lse, delta, p, k_at, v_at, n0, end, factor, d,
            D, KEEP, ROW, KEYS, True, ROUND, READ,
        )  # fmt: skip
    dq = (dq * scale).to(dq_ptr.dtype.element_ty)
    tl.store(dq_ptr + at[:, None] + d[None, :], dq, mask=live[:, None] & (d < D)[None, :])


@triton.jit
def _to_keys(
    dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, n, t0, end, before, head, factor, d,
    STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr, H: tl.constexpr, PART: tl.constexpr,
    D: tl.constexpr, KEEP: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    MASKED: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """dk and dv and what the query rows of TOKENS tokens add to them, keys in rows. A row that is not live has
    probability 2^(0 - inf). Not MASKED: every live row sees every key."""
    row = tl.arange(0, ROWS)
    t = t0 + row // PART
    h = head + row % PART
    live = (row < TOKENS * PART) & (t < end)
    at = t.to(tl.int64) * H + h
    q = _read(q_ptr + t.to(tl.int64) * STRIDE_T + h * STRIDE_H, live, d, D, READ)
    dout = _read(dout_ptr + t.to(tl.int64) * (H * D) + h * D, live, d, D, READ)
    lse = tl.load(lse_ptr + at, mask=live, other=float("inf"))
    delta = tl.load(delta_ptr + at, mask=live, other=0.0)
    scores = tl.dot(k, tl.trans(q), input_precision="ieee")
    probability = tl.exp2(scores * factor - lse[None, :])
    if MASKED:
        p = t + before
        seen = n[:, None] <= p[None, :]
        if KEEP:
            seen = seen & (n[:, None] > p[None, :] - KEEP)
        probability = tl.where(seen, probability, 0.0)
    dv = tl.dot(probability.to(ROUND).to(READ), dout, dv, input_precision="ieee")
    # minus delta from the start: a thread holds the accumulator anyway, and delta no longer
    dprobability = tl.zeros((KEYS, ROWS), dtype=tl.float32) - delta[None, :]
    dprobability = tl.dot(v, tl.trans(dout), dprobability, input_precision="ieee")
    dscores = probability * dprobability
    dk = tl.dot(dscores.to(ROUND).to(READ), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["width"])
def _keys(
    q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    table_ptr, starts_ptr, past_ptr, tiles_ptr, width, part, scale, factor,
    STRIDE_T: tl.constexpr, STRIDE_H: tl.constexpr, H: tl.constexpr, EACH: tl.constexpr,
    PART: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, KEEP: tl.constexpr,
    ROW: tl.constexpr, TO_ROW: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Of a tile of keys and PART query heads of their key head: dk and dv, over the tokens that see them, ascending.
    part: how far the sums of one part of the heads lie from those of the next."""
    GROUPED: tl.constexpr = H // PART
    tile, each = tl.program_id(0) // GROUPED, tl.program_id(0) % GROUPED
    s, n0 = tl.load(tiles_ptr + 2 * tile), tl.load(tiles_ptr + 2 * tile + 1)
    if s < 0:
        return
    start, end = tl.load(starts_ptr + s), tl.load(starts_ptr + s + 1)
    before = tl.load(past_ptr + s) - start  # a token's position less its place in the step
    n, d, g, head = n0 + tl.arange(0, KEYS), tl.arange(0, WIDE), each * PART // EACH, each * PART
    there = n < end + before
    place = tl.load(table_ptr + s.to(tl.int64) * width).to(tl.int64) + n
    k = _read(k_ptr + place * ROW + g * D, there, d, D, READ)
    v = _read(v_ptr + place * ROW + g * D, there, d, D, READ)
    first = tl.maximum(n0 - before, start)
    if KEEP:
        end = tl.minimum(end, n0 + KEYS - 1 + KEEP - before)
        clear = tl.maximum(end, first)
    else:
        hidden = tl.maximum(n0 + KEYS - 1 - before - first, 0)  # tokens that some key is ahead of
        clear = first + tl.cdiv(hidden, TOKENS) * TOKENS
    dk = tl.zeros((KEYS, WIDE), dtype=tl.float32)
    dv = tl.zeros((KEYS, WIDE), dtype=tl.float32)
    for t0 in range(first, tl.minimum(clear, end), TOKENS):
        dk, dv = _to_keys(
            dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, n, t0, end, before, head, factor, d,
            STRIDE_T, STRIDE_H, H, PART, D, KEEP, TOKENS, ROWS, KEYS, True, ROUND, READ,
        )  # fmt: skip
    for t0 in range(clear, end, TOKENS):
        dk, dv = _to_keys(
            dk, dv, k, v, q_ptr, dout_ptr, lse_ptr, delta_ptr, n, t0, end, before, head, factor, d,
            STRIDE_T, STRIDE_H, H, PART, D, KEEP, TOKENS, ROWS, KEYS, False, ROUND, READ,
        )  # fmt: skip
    z = (each % (EACH // PART)).to(tl.int64)
    at = (z * part + place * TO_ROW + g * D)[:, None] + d[None, :]
    both = there[:, None] & (d < D)[None, :]
    tl.store(dk_ptr + at, (dk * scale).to(dk_ptr.dtype.element_ty), mask=both)
    tl.store(dv_ptr + at, dv.to(dv_ptr.dtype.element_ty), mask=both)


@triton.jit(do_not_specialize=["width"])
def _summed(
    dk_parts_ptr, dv_parts_ptr, dk_ptr, dv_ptr, table_ptr, starts_ptr, past_ptr, tiles_ptr,
    width, part, PARTS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr,
    PART_ROW: tl.constexpr, TO_ROW: tl.constexpr, KEYS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The parts of a tile of keys, first to last, rounded once."""
    s, n0 = tl.load(tiles_ptr + 2 * tl.program_id(0)), tl.load(tiles_ptr + 2 * tl.program_id(0) + 1)
    if s < 0:
        return
    total = tl.load(past_ptr + s) + tl.load(starts_ptr + s + 1) - tl.load(starts_ptr + s)
    base = tl.load(table_ptr + s.to(tl.int64) * width).to(tl.int64)
    d, channel = tl.arange(0, WIDE), tl.program_id(1) * D
    for i in range(0, KEYS, STEP):
        n = n0 + i + tl.arange(0, STEP)
        mask = (n < total)[:, None] & (d < D)[None, :]
        at = ((base + n) * PART_ROW + channel)[:, None] + d[None, :]
        dk = tl.load(dk_parts_ptr + at, mask=mask, other=0.0)
        dv = tl.load(dv_parts_ptr + at, mask=mask, other=0.0)
        for _ in range(1, PARTS):
            at += part
            dk += tl.load(dk_parts_ptr + at, mask=mask, other=0.0)
            dv += tl.load(dv_parts_ptr + at, mask=mask, other=0.0)
        to = ((base + n) * TO_ROW + channel)[:, None] + d[None, :]
        tl.store(dk_ptr + to, dk.to(dk_ptr.dtype.element_ty), mask=mask)
        tl.store(dv_ptr + to, dv.to(dv_ptr.dtype.element_ty), mask=mask)


def gradients(
    dout_THD: Tensor,
    q_THD: Tensor,
    k: Pages,
    v: Pages,
    who: Sequences,
    out_THD: Tensor,
    lse_TH: Tensor,
    *,
    scale: float,
    keep: int | None,
    groups: int,
    query_tile: Tile | None = None,
    key_tile: Tile | None = None,
    parts: int | None = None,
) -> tuple[Tensor, ...]:
    """Of q, and of the values of k and v, or of the one tensor that both lie in: float32 sums, rounded once to the
    dtype of each; zeros for tokens of padding and for rows that no token sees.

    out_THD, lse_TH: what `triton.attend` gave and filled. k and v are flat, and no two sequences share a row. For
    tests: tiles, and parts of a group's heads; each has bits of its own.
    """
    (T, H, D), each = q_THD.shape, q_THD.shape[1] // groups
    by_width = min(width for width in QUERY_TILES if width >= D)
    rows, keys, warps, stages = query_tile or QUERY_TILES[by_width]
    q_THD = q_THD if q_THD.stride(2) == 1 else q_THD.contiguous()
    dout_THD = dout_THD.contiguous()
    dq_THD = torch.zeros_like(q_THD, memory_format=torch.contiguous_format)
    delta_TH, table = torch.empty_like(lse_TH), k.table_SK.contiguous()
    tokens = max(1, rows // each)
    tiles = tile_list(who, T, tokens)
    exact = q_THD.dtype == torch.float32
    step = (scale, scale * math.log2(math.e), *strides(q_THD), H, each)
    shape = {
        "D": D, "WIDE": max(16, triton.next_power_of_2(D)), "KEEP": keep or 0, "ROW": k.row,
        "ROUND": tl.float32 if exact else tl.bfloat16, "READ": tl.float32 if exact else READ,
        "enable_fp_fusion": True,
    }  # fmt: skip
    _queries[(len(tiles) * groups,)](
        q_THD, line(k), line(v), out_THD, dout_THD, lse_TH, delta_TH, dq_THD, table,
        who.sequence_T, who.position_T, tiles, len(tiles), table.shape[1], *step, **shape,
        ROWS=max(16, triton.next_power_of_2(tokens * each)), KEYS=keys, num_warps=warps,
        num_stages=stages,
    )  # fmt: skip
    rest = (q_THD, k, v, who, dout_THD, lse_TH, delta_TH, table, step, shape)
    return dq_THD, *_of_keys(*rest, key_tile or KEY_TILES[by_width], parts)


def _of_keys(
    q_THD: Tensor,
    k: Pages,
    v: Pages,
    who: Sequences,
    dout_THD: Tensor,
    lse_TH: Tensor,
    delta_TH: Tensor,
    table: Tensor,
    step: tuple[float, ...],
    shape: dict[str, object],
    tile: Tile,
    parts: int | None,
) -> tuple[Tensor, ...]:
    """Of the values of k and v, or of the one tensor that both lie in."""
    (rows, keys, warps, stages), (H, each), D = tile, (int(n) for n in step[-2:]), q_THD.shape[-1]
    one, groups = k.values is v.values, H // each
    grads = [torch.zeros_like(k.values, memory_format=torch.contiguous_format)]
    grads += [] if one else [torch.zeros_like(v.values, memory_format=torch.contiguous_format)]
    number = len(k.values)
    tiles = key_tiles(who, number, keys, int(shape["KEEP"]))  # type: ignore[call-overload]
    parts = parts or parts_of(number // keys * groups, each)
    to = (grads[0].view(-1)[k.start :], grads[-1].view(-1)[v.start :])
    to_row, sums, part = k.values[0].numel(), to, 0
    if parts > 1:
        own = q_THD.new_empty(parts, number, 2, groups * D, dtype=torch.float32)
        sums, part = (own.view(-1), own.view(-1)[groups * D :]), own[0].numel()
    tokens = max(1, rows // (each // parts))
    where = (table, who.starts_S1, who.past_S, tiles, table.shape[1], part)
    _keys[(len(tiles) * groups * parts,)](
        q_THD, line(k), line(v), dout_THD, lse_TH, delta_TH, *sums, *where, *step,
        PART=each // parts, **shape, TO_ROW=2 * groups * D if parts > 1 else to_row,
        TOKENS=tokens, ROWS=max(16, triton.next_power_of_2(tokens * each // parts)), KEYS=keys,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if parts > 1:
        _summed[(len(tiles), groups)](
            *sums, *to, *where, PARTS=parts, D=D, WIDE=shape["WIDE"], PART_ROW=2 * groups * D,
            TO_ROW=to_row, KEYS=keys, STEP=min(keys, 32), num_warps=8,
        )  # fmt: skip
    return tuple(grads)


def parts_of(programs: int, each: int) -> int:
    """How many parts a group's heads are cut into, so that there are enough programs; each part has its own sums in
    memory, so that this bounds them, too."""
    cuts = [parts for parts in PARTS if each % parts == 0]
    return next((parts for parts in cuts if programs * parts >= PROGRAMS), cuts[-1])


def key_tiles(who: Sequences, rows: int, keys: int, keep: int) -> Tensor:
    """int32 [V, 2]: the sequence of a tile of keys and its first position; -1 where there is none. rows: no fewer than
    the sequences have."""
    number = rows // keys + len(who.past_S)
    tiles = torch.full((number, 2), -1, dtype=torch.int32, device=who.past_S.device)
    _key_tiles[(len(who.past_S),)](who.starts_S1, who.past_S, tiles, keep, keys, 128, num_warps=1)
    return tiles
