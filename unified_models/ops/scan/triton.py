"""Replay of the open chunk for any GPU that Triton knows: the expressions and roundings of README.md.

`fold` moves the states of sequences whose chunks fill up, `rows` computes y. Each sums a chunk in one shape, so neither
knows whether a token was decoded or came with its chunk.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.pages import FLAT, Sequences, row_lanes
from unified_models.ops.scan.grid import TILE
from unified_models.ops.scan.places import Places

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Triton's interpreter multiplies bfloat16 as if it were whole numbers."""
SPOT = 8
"""Numbers that `_pairs` tells `_rows` of a tile, 64 bytes."""
FULL = 512
"""Programs that keep a large GPU busy."""
FOLDS, AHEAD = 8, 64
"""Programs of `_fold` beside each other for a head; sequences that one looks at together."""
GROUPS = 1
"""Groups of a program of `_pairs`."""
REGISTERS, PAIRS_REGISTERS = 128, 64
"""Of a thread of `_rows` and `_pairs`, in bfloat16: four programs of either share a processor of Hopper."""
VARYING = [
    "table_row",
    "x_page",
    "dt_page",
    "b_page",
    "states_row",
    "state_page",
    "seen_page",
    "c_row",
    "S",
    "T",
]


@triton.jit
def _decay(dt, a):
    """The running sum of dt * a over a chunk's places: float64 adds, each sum rounded. dt is never loaded in lanes: how
    threads share it, and so the order of these adds, follows from the model's sizes alone."""
    return tl.cumsum((dt * a).to(tl.float64), axis=0).to(tl.float32)


@triton.jit
def _at(
    table_ptr, s, table_row, page, row, start, first, PER_PAGE: tl.constexpr, LANE: tl.constexpr
):  # fmt: skip
    """Where row `first` of sequence s begins; a chunk lies in one page. page, row and start count lanes."""
    number = tl.load(table_ptr + s.to(tl.int64) * table_row + first // PER_PAGE).to(tl.int64)
    return (number * page + (first % PER_PAGE).to(tl.int64) * row + start) * LANE


@triton.jit(do_not_specialize=VARYING)
def _fold(
    x_ptr, dt_ptr, b_ptr, a_ptr, state_ptr, past_ptr, total_ptr, table_ptr, states_ptr,
    table_row, x_page, x_row, x_start, dt_page, dt_row, dt_start, b_page, b_row, b_start,
    states_row, state_page, state_start, seen_ptr, seen_page, seen_start, S,
    PER_PAGE: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, AHEAD: tl.constexpr,
    X: tl.constexpr, B: tl.constexpr, STATE: tl.constexpr, SEEN: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """S' = e^{A_last} S + sum_j x_j b'_j^T for each chunk that is full after the step, of one head and of each
    num_programs-th sequence, in turn: few of a decoding step's have one, and a program takes time to begin."""
    h, apart = tl.program_id(0), tl.num_programs(1)
    j, n, p = tl.arange(0, QB), tl.arange(0, NB), tl.arange(0, PB)
    inside = (p[:, None] < P) & (n[None, :] < N)
    within = (h * P + p)[:, None] * N + n[None, :]
    a = tl.load(a_ptr + h)
    for begin in range(tl.program_id(1), S, apart * AHEAD):
        some = begin + tl.arange(0, AHEAD) * apart
        past = tl.load(past_ptr + some, mask=some < S, other=0)
        total = tl.load(total_ptr + some, mask=some < S, other=0)
        some_full = tl.max(total // Q - past // Q, axis=0) > 0
        turns = tl.where(some_full, tl.minimum(tl.cdiv(S - begin, apart), AHEAD), 0)
        for turn in range(turns):
            s = begin + turn * apart
            first, end = tl.load(past_ptr + s) // Q, tl.load(total_ptr + s) // Q
            states_at = states_ptr + s.to(tl.int64) * states_row
            state = tl.zeros((PB, NB), dtype=tl.float32)
            if (first > 0) & (first < end):
                at = tl.load(states_at + first - 1).to(tl.int64) * state_page + state_start
                state = tl.load(state_ptr + at * STATE + within, mask=inside, other=0.0)
            for chunk in range(first, end):
                row = chunk * Q
                at = _at(table_ptr, s, table_row, x_page, x_row, x_start, row, PER_PAGE, X)
                x_at = x_ptr + at
                at = _at(table_ptr, s, table_row, dt_page, dt_row, dt_start, row, PER_PAGE, 1)
                dt_at = dt_ptr + at
                at = _at(table_ptr, s, table_row, b_page, b_row, b_start, row, PER_PAGE, B)
                b_at = b_ptr + at
                dt = tl.load(dt_at + j * dt_row + h, mask=j < Q, other=0.0).to(tl.float32)
                decay = _decay(dt, a)
                last = tl.sum(tl.where(j == Q - 1, decay, 0.0), axis=0)
                left = tl.exp(tl.minimum(last - decay, 0.0)) * dt
                b_at += j[:, None] * b_row * B + (h // (H // G)) * N + n[None, :]
                b = tl.load(b_at, mask=(j < Q)[:, None] & (n[None, :] < N), other=0.0)
                x_at += j[:, None] * x_row * X + h * P + p[None, :]
                x = tl.load(x_at, mask=(j < Q)[:, None] & (p[None, :] < P), other=0.0)
                b = (b.to(tl.float32) * left[:, None]).to(ROUND)
                added = tl.dot(tl.trans(x.to(READ)), b.to(READ), input_precision="ieee")
                state = tl.exp(last) * state + added
                page = tl.load(states_at + chunk).to(tl.int64)
                at = state_ptr + (page * state_page + state_start) * STATE + within
                tl.store(at, state, mask=inside)
                at = seen_ptr + (page * seen_page + seen_start) * SEEN + within
                tl.store(at, state.to(seen_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tell(spot, x_at, seen_at, before, place, past, count, mask):
    """A tile's spot, for `_rows`."""
    tl.store(spot, x_at, mask=mask)
    tl.store(spot + 1, seen_at, mask=mask)
    tl.store(spot + 2, before.to(tl.int64), mask=mask)
    tl.store(spot + 3, place.to(tl.int64), mask=mask)
    tl.store(spot + 4, past.to(tl.int64), mask=mask)
    tl.store(spot + 5, count.to(tl.int64), mask=mask)


@triton.jit
def _clear(y_ptr, begin, end, step, row, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Zeros of WIDTH elements from y_ptr on, in rows begin, begin + step, ... before end."""
    at = tl.arange(0, BLOCK)
    for t in range(begin, end, step):
        for start in range(0, WIDTH, BLOCK):
            to = y_ptr + tl.cast(t, tl.int64) * row + start + at
            zeros = tl.zeros((BLOCK,), dtype=y_ptr.dtype.element_ty)
            tl.store(to, zeros, mask=start + at < WIDTH)


@triton.jit(do_not_specialize=VARYING)
def _pairs(
    dt_ptr, b_ptr, c_ptr, a_ptr, cb_ptr, decay_ptr, times_ptr, spots_ptr,
    tiles_ptr, starts_ptr, past_ptr, total_ptr, table_ptr, states_ptr,
    table_row, x_page, x_row, x_start, dt_page, dt_row, dt_start, b_page, b_row, b_start,
    states_row, seen_page, seen_start, c_row, y_ptr, S, T,
    PER_PAGE: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr, SPOT: tl.constexpr, GROUPS: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Of a tile and a group: c_i . b_j, and the decay and the time step of the group's HEADS heads at each place of the
    chunk that has a token, by heads. Of a tile: where its x and its state begin, in lanes (-1: there is no state), the
    token of the chunk's first place, its own first place, the first new one, and how many have tokens, 0 of padding:
    `_rows` reads them at once, where it would follow one table after another. And y of padding, which no tile has."""
    v, first = tl.program_id(1), tl.program_id(0) * GROUPS
    s, tile = tl.load(tiles_ptr + 2 * v), tl.load(tiles_ptr + 2 * v + 1)
    spot = spots_ptr + v.to(tl.int64) * SPOT
    if s >= 0:
        past, total = tl.load(past_ptr + s), tl.load(total_ptr + s)
        chunk, place = tile // (QB // TILE), tile % (QB // TILE) * TILE
        row = chunk * Q
        j, n, k = tl.arange(0, QB), tl.arange(0, NB), tl.arange(0, HEADS)
        own = tl.arange(0, TILE)
        i = place + own
        there = (j < Q) & (row + j < total)
        new = (i < Q) & (row + i < total) & (row + i >= past)
        before = tl.load(starts_ptr + s) + row - past
        token = (before + i).to(tl.int64)
        x_at = _at(table_ptr, s, table_row, x_page, x_row, x_start, row, PER_PAGE, 1)
        dt_at = dt_ptr + _at(table_ptr, s, table_row, dt_page, dt_row, dt_start, row, PER_PAGE, 1)
        b_at = b_ptr + _at(table_ptr, s, table_row, b_page, b_row, b_start, row, PER_PAGE, B)
        # Before the first chunk's end there is no state.
        page = tl.load(states_ptr + s.to(tl.int64) * states_row + tl.maximum(chunk - 1, 0))
        of_heads, count = k[None, :] < H // G, tl.minimum(total - row, Q)
        # Also of one turn: what a loop loads is asked for at once, where straight code waits for one after another.
        for g in tl.range(first, first + GROUPS, num_stages=2):
            head = g * (H // G) + k
            at = dt_at + j[:, None] * dt_row + head[None, :]
            dt = tl.load(at, mask=there[:, None] & of_heads, other=0.0).to(tl.float32)
            a = tl.load(a_ptr + head, mask=k < H // G, other=0.0)
            at = b_at + g * N + j[None, :] * (b_row * B) + n[:, None]
            b = tl.load(at, mask=there[None, :] & (n[:, None] < N), other=0.0)
            at = c_ptr + token[:, None] * c_row * C + g * N + n[None, :]
            c = tl.load(at, mask=new[:, None] & (n[None, :] < N), other=0.0)
            cb = tl.dot(c.to(READ), b.to(READ), input_precision="ieee")
            at = cb_ptr + (v * G + g).to(tl.int64) * TILE * QB + own[:, None] * QB + j[None, :]
            tl.store(at, cb, mask=new[:, None] & (j[None, :] < QB))
            decay = _decay(dt, a[None, :])
            at = (v * H + head[None, :]).to(tl.int64) * QB + j[:, None]
            kept = (j // 4 < (count + 3) // 4)[:, None] & of_heads  # four at once
            tl.store(decay_ptr + at, decay, mask=kept)
            tl.store(times_ptr + at, dt, mask=kept)
        seen_at = tl.where(chunk > 0, page.to(tl.int64) * seen_page + seen_start, -1)
        _tell(spot, x_at, seen_at, before, place, past - row, count, first == 0)
    else:
        tl.store(spot + 5, tl.zeros((), dtype=tl.int64), mask=first == 0)
    padding = tl.load(starts_ptr + S) + v
    channels: tl.constexpr = GROUPS * (H // G) * P
    _clear(y_ptr + first * (H // G) * P, padding, T, tl.num_programs(1), H * P, channels, PB)


@triton.jit(do_not_specialize=["c_row"])
def _rows(
    x_ptr, c_ptr, skip_ptr, seen_ptr, cb_ptr, decay_ptr, times_ptr, spots_ptr, y_ptr, x_row, c_row,
    Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, SPOT: tl.constexpr, STAGES: tl.constexpr,
    X: tl.constexpr, SEEN: tl.constexpr, C: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """y of the new tokens among a tile's places, for HEADS heads of one group."""
    v, first = tl.program_id(1), tl.program_id(0) * HEADS
    spot = spots_ptr + v.to(tl.int64) * SPOT
    x_lane, seen_lane, before = tl.load(spot), tl.load(spot + 1), tl.load(spot + 2)
    place, past, count = tl.load(spot + 3), tl.load(spot + 4), tl.load(spot + 5)
    if count > 0:
        j, n, p, own = tl.arange(0, QB), tl.arange(0, NB), tl.arange(0, PB), tl.arange(0, TILE)
        i = place.to(tl.int32) + own
        there, mine = j < count.to(tl.int32), i < count.to(tl.int32)
        new = mine & (i >= past.to(tl.int32))
        token, g = before + i, first // (H // G)
        x_at, seen_at = x_ptr + x_lane * X, seen_ptr + tl.maximum(seen_lane, 0) * SEEN
        within, kept = p[:, None] * N + n[None, :], tl.where(seen_lane >= 0, N, 0)
        c_at = c_ptr + token[:, None] * c_row * C + g * N + n[None, :]
        y_at = y_ptr + token[:, None] * (H * P) + p[None, :]
        cb_at = cb_ptr + (v * G + g).to(tl.int64) * TILE * QB + own[:, None] * QB + j[None, :]
        cb = tl.load(cb_at, mask=new[:, None] & (j[None, :] < QB), other=0.0)
        wide = p[None, :] < P
        for head in tl.range(first, first + HEADS, num_stages=STAGES):
            # All that a head reads is asked for before anything waits, c too, which no register holds.
            at = (v * H + head).to(tl.int64) * QB
            dt = tl.load(times_ptr + at + j, mask=there, other=0.0)
            decay = tl.load(decay_ptr + at + j, mask=there, other=0.0)
            decay_i = tl.load(decay_ptr + at + i, mask=mine, other=0.0)
            c = tl.load(c_at, mask=new[:, None] & (n[None, :] < N), other=0.0)
            x_of = x_at + head * P
            rows = j[:, None] * (x_row * X) + p[None, :]
            x = tl.load(x_of + rows, mask=there[:, None] & wide, other=0.0)
            rows = i[:, None] * (x_row * X) + p[None, :]
            own_x = tl.load(x_of + rows, mask=mine[:, None] & wide, other=0.0)
            inside = (p[:, None] < P) & (n[None, :] < kept)
            state = tl.load(seen_at + head * (P * N) + within, mask=inside, other=0.0)
            w = cb * tl.exp(tl.minimum(decay_i[:, None] - decay[None, :], 0.0)) * dt[None, :]
            w = tl.where(j[None, :] <= i[:, None], w, 0.0).to(ROUND)
            y = tl.dot(w.to(READ), x.to(READ), input_precision="ieee")
            old = tl.dot(c.to(READ), tl.trans(state.to(READ)), input_precision="ieee")
            y = tl.exp(decay_i)[:, None] * old + (y + 0.0)
            y += tl.load(skip_ptr + head) * own_x.to(tl.float32)
            tl.store(y_at + head * P, y.to(y_ptr.dtype.element_ty), mask=new[:, None] & wide)


@triton.jit(do_not_specialize=["S", "V"])
def _tiles(
    past_ptr, total_ptr, tiles_ptr, S, V,
    Q: tl.constexpr, QB: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The tiles of one sequence, behind those of the sequences before it."""
    s, before = tl.program_id(0), 0
    for start in range(0, s, BLOCK):
        at = start + tl.arange(0, BLOCK)
        past = tl.load(past_ptr + at, mask=at < s, other=0)
        total = tl.load(total_ptr + at, mask=at < s, other=0)
        first, last = past // Q * (QB // TILE) + past % Q // TILE, total - 1
        last = last // Q * (QB // TILE) + last % Q // TILE
        before += tl.sum(tl.where(total > past, last - first + 1, 0), axis=0)
    past, last = tl.load(past_ptr + s), tl.load(total_ptr + s) - 1
    if last >= past:
        first = past // Q * (QB // TILE) + past % Q // TILE
        last = last // Q * (QB // TILE) + last % Q // TILE
        for start in range(first, last + 1, BLOCK):
            tile = start + tl.arange(0, BLOCK)
            at = before + tile - first
            tl.store(tiles_ptr + 2 * at, s + tl.zeros_like(tile), mask=(tile <= last) & (at < V))
            tl.store(tiles_ptr + 2 * at + 1, tile, mask=(tile <= last) & (at < V))


def tiles(who: Sequences, tokens: int, chunk: int) -> Tensor:
    """[V, 2]: sequence and number of each tile of 16 places with new tokens, -1 behind them. A tile's number counts
    from the sequence's start, whole tiles a chunk. V follows from the numbers of tokens and sequences."""
    S = len(who.total_S)
    V = min(tokens, tokens // TILE + 2 * S + tokens // chunk)
    out = torch.full((max(V, 1), 2), -1, dtype=torch.int32, device=who.total_S.device)
    if V:
        _tiles[(S,)](who.past_S, who.total_S, out, S, V, chunk, lanes(chunk), TILE, 64, num_warps=1)
    return out


def chunks(who: Sequences, tokens: int, chunk: int) -> Tensor:
    """[U, 2]: sequence and number of each chunk with new tokens, -1 behind them; U as `tiles` has V."""
    S = len(who.total_S)
    U = min(tokens, tokens // chunk + 2 * S)
    out = torch.full((max(U, 1), 2), -1, dtype=torch.int32, device=who.total_S.device)
    if U:
        size = lanes(chunk)
        _tiles[(S,)](who.past_S, who.total_S, out, S, U, chunk, size, size, 64, num_warps=1)
    return out


def lanes(n: int) -> int:
    """n values in the shapes that a product of tensor cores has."""
    return max(TILE, int(triton.next_power_of_2(n)))


def sizes(of: Places) -> list[int]:
    """Of the model; they are part of the compiled kernel."""
    H, P, N = of.shape
    Q = of.chunk
    return [of.x.per_page, Q, H, P, of.groups, N, lanes(Q), lanes(P), lanes(N)]


def scan(
    of: Places,
    c_TGN: Tensor,
    a_H: Tensor,
    skip_H: Tensor,
    who: Sequences,
    tiles_V2: Tensor,
    heads: int | None = None,
    warps: int = 4,
    stages: int = 2,
    registers: int | None = REGISTERS,
) -> Tensor:
    """y [T, H, P] in c's dtype, zeros of padding; the states of chunks that fill up are kept in their pages.

    heads, warps, stages, registers: of a program of `_rows`, for tests; each head is computed by itself.
    """
    H, P, _ = of.shape
    T, dtype = len(c_TGN), c_TGN.dtype
    assert of.seen.values.dtype == dtype, f"states are seen as {of.seen.values.dtype}, c is {dtype}"
    y = torch.empty(T, H, P, dtype=dtype, device=c_TGN.device)
    if not T:
        return y
    if not c_TGN[:1].is_contiguous():
        c_TGN = c_TGN.contiguous()
    rounding = tl.bfloat16 if dtype == torch.bfloat16 else tl.float32
    read = tl.float32 if INTERPRETED else rounding
    fold(of, a_H, who, rounding, read)
    V, each = len(tiles_V2), H // of.groups
    Q, rows, states, seen = lanes(of.chunk), of.x.table_SK, of.states.table_SK, of.seen
    cb = torch.empty(V, of.groups, TILE, Q, dtype=torch.float32, device=y.device)
    decay = torch.empty(V, H, Q, dtype=torch.float32, device=y.device)
    times, spots = torch.empty_like(decay), cb.new_empty(V, SPOT, dtype=torch.int64)
    x, b, dt = of.x.places, of.b.places, (of.dt.page, of.dt.row, of.dt.start)
    c, c_lane = row_lanes(c_TGN)
    _pairs[(of.groups // GROUPS, V)](
        of.dt.values, of.b.values, c_TGN, a_H, cb, decay, times, spots,
        tiles_V2, who.starts_S1, who.past_S, who.total_S, rows, states,
        rows.stride(0), *x, *dt, *b, states.stride(0), seen.places[0], seen.places[2], c,
        y, len(who.total_S), T, *sizes(of), triton.next_power_of_2(each), TILE, SPOT, GROUPS, of.b.lane, c_lane, read,
        num_warps=8, **few(of.x.values.dtype, PAIRS_REGISTERS),
    )  # fmt: skip
    heads = heads or heads_of(V, H, each)
    _rows[(H // heads, V)](
        of.x.values, c_TGN, skip_H, seen.values, cb, decay, times, spots, y, x[1], c,
        *sizes(of)[1:], heads, TILE, SPOT, stages, of.x.lane, seen.lane, c_lane, rounding, read,
        num_warps=warps, **few(of.x.values.dtype, registers),
    )  # fmt: skip
    return y


def few(dtype: torch.dtype, registers: int | None) -> dict[str, int]:
    """The option of a launch that leaves a thread so many registers; in float32 a product needs them all."""
    if registers is None or dtype != torch.bfloat16 or torch.version.hip is not None:
        return {}
    return {"maxnreg": registers}


def heads_of(tiles: int, H: int, each: int) -> int:
    """Heads of a program of `_rows`, of a group that has `each`: the next one's rows come while one is computed, where
    so many programs are left that none waits for them."""
    return next(n for n in (4, 2, 1) if each % n == 0 and (n == 1 or tiles * H // n >= FULL))


def fold(of: Places, a_H: Tensor, who: Sequences, rounding: tl.dtype, read: tl.dtype) -> None:
    """Keep the states after the chunks that fill up. In a pack all do, and each sequence has programs of its own; in an
    engine's pages few do in a step, and as many programs look for them as a large GPU runs side by side."""
    H, S, states, seen = of.shape[0], len(who.total_S), of.states, of.seen
    _fold[(H, S if of.x.per_page == FLAT else min(S, FOLDS))](
        of.x.values, of.dt.values, of.b.values, a_H, states.values, who.past_S, who.total_S,
        of.x.table_SK, states.table_SK, of.x.table_SK.stride(0),
        *of.x.places, of.dt.page, of.dt.row, of.dt.start, *of.b.places,
        states.table_SK.stride(0), states.places[0], states.places[2],
        seen.values, seen.places[0], seen.places[2], S, *sizes(of), AHEAD,
        of.x.lane, of.b.lane, states.lane, seen.lane, rounding, read, num_warps=8,
    )  # fmt: skip
