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
VARYING = [
    "table_row",
    "x_page",
    "dt_page",
    "b_page",
    "states_row",
    "state_page",
    "seen_page",
    "c_row",
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
    states_row, state_page, state_start, seen_ptr, seen_page, seen_start,
    PER_PAGE: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, HEADS: tl.constexpr,
    X: tl.constexpr, B: tl.constexpr, STATE: tl.constexpr, SEEN: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """S' = e^{A_last} S + sum_j x_j b'_j^T for each chunk of one sequence that is full after the step, HEADS heads one
    after the other: most programs find none, and it takes time to begin."""
    s = tl.program_id(1)
    first, end = tl.load(past_ptr + s) // Q, tl.load(total_ptr + s) // Q
    if first == end:
        return
    for h in range(tl.program_id(0) * HEADS, tl.program_id(0) * HEADS + HEADS):
        j, n, p = tl.arange(0, QB), tl.arange(0, NB), tl.arange(0, PB)
        inside = (p[:, None] < P) & (n[None, :] < N)
        within = (h * P + p)[:, None] * N + n[None, :]
        states_at = states_ptr + s.to(tl.int64) * states_row
        state = tl.zeros((PB, NB), dtype=tl.float32)
        a = tl.load(a_ptr + h)
        if first > 0:
            at = tl.load(states_at + first - 1).to(tl.int64) * state_page + state_start
            state = tl.load(state_ptr + at * STATE + within, mask=inside, other=0.0)
        for chunk in range(first, end):
            row = chunk * Q
            x_at = x_ptr + _at(table_ptr, s, table_row, x_page, x_row, x_start, row, PER_PAGE, X)
            dt_at = dt_ptr + _at(
                table_ptr, s, table_row, dt_page, dt_row, dt_start, row, PER_PAGE, 1
            )
            b_at = b_ptr + _at(table_ptr, s, table_row, b_page, b_row, b_start, row, PER_PAGE, B)
            dt = tl.load(dt_at + j * dt_row + h, mask=j < Q, other=0.0).to(tl.float32)
            decay = _decay(dt, a)
            last = tl.sum(tl.where(j == Q - 1, decay, 0.0), axis=0)
            left = tl.exp(tl.minimum(last - decay, 0.0)) * dt
            b_at += j[:, None] * b_row * B + (h // (H // G)) * N + n[None, :]
            b = tl.load(b_at, mask=(j < Q)[:, None] & (n[None, :] < N), other=0.0).to(tl.float32)
            x_at += j[:, None] * x_row * X + h * P + p[None, :]
            x = tl.load(x_at, mask=(j < Q)[:, None] & (p[None, :] < P), other=0.0)
            b = (b * left[:, None]).to(ROUND)
            added = tl.dot(tl.trans(x.to(READ)), b.to(READ), input_precision="ieee")
            state = tl.exp(last) * state + added
            page = tl.load(states_at + chunk).to(tl.int64)
            at = state_ptr + (page * state_page + state_start) * STATE + within
            tl.store(at, state, mask=inside)
            at = seen_ptr + (page * seen_page + seen_start) * SEEN + within
            tl.store(at, state.to(seen_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=VARYING)
def _pairs(
    dt_ptr, b_ptr, c_ptr, a_ptr, cb_ptr, decay_ptr,
    tiles_ptr, starts_ptr, past_ptr, total_ptr, table_ptr,
    table_row, dt_page, dt_row, dt_start, b_page, b_row, b_start, c_row,
    PER_PAGE: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr,
    HEADS: tl.constexpr, TILE: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """Of a tile and a group: c_i . b_j, and the decay of the group's HEADS heads at each place of the chunk."""
    v, g = tl.program_id(1), tl.program_id(0)
    s, tile = tl.load(tiles_ptr + 2 * v), tl.load(tiles_ptr + 2 * v + 1)
    if s >= 0:
        past, total = tl.load(past_ptr + s), tl.load(total_ptr + s)
        row, place = tile // (QB // TILE) * Q, tile % (QB // TILE) * TILE
        j, n, k = tl.arange(0, QB), tl.arange(0, NB), tl.arange(0, HEADS)
        i = place + tl.arange(0, TILE)
        there = (j < Q) & (row + j < total)
        new = (i < Q) & (row + i < total) & (row + i >= past)
        token = (tl.load(starts_ptr + s) + row - past + i).to(tl.int64)
        dt_at = dt_ptr + _at(table_ptr, s, table_row, dt_page, dt_row, dt_start, row, PER_PAGE, 1)
        b_at = b_ptr + _at(table_ptr, s, table_row, b_page, b_row, b_start, row, PER_PAGE, B)
        b_at += j[:, None] * b_row * B + g * N + n[None, :]
        b = tl.load(b_at, mask=there[:, None] & (n[None, :] < N), other=0.0)
        c_at = c_ptr + token[:, None] * c_row * C + g * N + n[None, :]
        c = tl.load(c_at, mask=new[:, None] & (n[None, :] < N), other=0.0)
        of_heads = k[None, :] < H // G
        head = g * (H // G) + k
        dt_at += j[:, None] * dt_row + head[None, :]
        dt = tl.load(dt_at, mask=there[:, None] & of_heads, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + head, mask=k < H // G, other=0.0)
        cb = tl.dot(c.to(READ), tl.trans(b.to(READ)), input_precision="ieee")
        at = (v * G + g).to(tl.int64) * TILE * QB + tl.arange(0, TILE)[:, None] * QB + j[None, :]
        tl.store(cb_ptr + at, cb, mask=new[:, None] & (j[None, :] < QB))
        decay = _decay(dt, a[None, :])
        at = (v * H + head[None, :]).to(tl.int64) * QB + j[:, None]
        tl.store(decay_ptr + at, decay, mask=of_heads & (j[:, None] < QB))


@triton.jit(do_not_specialize=VARYING)
def _rows(
    x_ptr, dt_ptr, c_ptr, skip_ptr, seen_ptr, cb_ptr, decay_ptr, y_ptr,
    tiles_ptr, starts_ptr, past_ptr, total_ptr, table_ptr, states_ptr,
    table_row, x_page, x_row, x_start, dt_page, dt_row, dt_start,
    states_row, seen_page, seen_start, c_row,
    PER_PAGE: tl.constexpr, Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, HEADS: tl.constexpr,
    TILE: tl.constexpr, STAGES: tl.constexpr,
    X: tl.constexpr, SEEN: tl.constexpr, C: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """y of the new tokens among a tile's places, for HEADS heads of one group."""
    v, first = tl.program_id(1), tl.program_id(0) * HEADS
    s, tile = tl.load(tiles_ptr + 2 * v), tl.load(tiles_ptr + 2 * v + 1)
    if s >= 0:
        past, total = tl.load(past_ptr + s), tl.load(total_ptr + s)
        chunk, place = tile // (QB // TILE), tile % (QB // TILE) * TILE
        row = chunk * Q
        j, n, p, own = tl.arange(0, QB), tl.arange(0, NB), tl.arange(0, PB), tl.arange(0, TILE)
        i = place + own
        there = (j < Q) & (row + j < total)
        mine = (i < Q) & (row + i < total)
        new = mine & (row + i >= past)
        token = (tl.load(starts_ptr + s) + row - past + i).to(tl.int64)
        x_at = x_ptr + _at(table_ptr, s, table_row, x_page, x_row, x_start, row, PER_PAGE, X)
        dt_at = dt_ptr + _at(table_ptr, s, table_row, dt_page, dt_row, dt_start, row, PER_PAGE, 1)
        # Before the first chunk's end there is no state: its place is not read, and counts as zeros.
        page = tl.load(states_ptr + s.to(tl.int64) * states_row + tl.maximum(chunk - 1, 0))
        seen_at = seen_ptr + (page.to(tl.int64) * seen_page + seen_start) * SEEN
        kept = tl.where(row > 0, N, 0)
        g = first // (H // G)
        c_at = c_ptr + token[:, None] * c_row * C + g * N + n[None, :]
        c = tl.load(c_at, mask=new[:, None] & (n[None, :] < N), other=0.0).to(READ)
        cb_at = cb_ptr + (v * G + g).to(tl.int64) * TILE * QB + own[:, None] * QB + j[None, :]
        cb = tl.load(cb_at, mask=new[:, None] & (j[None, :] < QB), other=0.0)
        wide = p[None, :] < P
        for head in tl.range(first, first + HEADS, num_stages=STAGES):
            within = (head * P + p)[:, None] * N + n[None, :]
            state = tl.load(
                seen_at + within, mask=(p[:, None] < P) & (n[None, :] < kept), other=0.0
            )
            x_of = x_at + head * P + p[None, :]
            x = tl.load(x_of + j[:, None] * x_row * X, mask=there[:, None] & wide, other=0.0)
            own_x = tl.load(x_of + i[:, None] * x_row * X, mask=mine[:, None] & wide, other=0.0)
            dt = tl.load(dt_at + j * dt_row + head, mask=there, other=0.0).to(tl.float32)
            decay_at = decay_ptr + (v * H + head).to(tl.int64) * QB
            decay = tl.load(decay_at + j)
            decay_i = tl.load(decay_at + i)
            w = cb * tl.exp(tl.minimum(decay_i[:, None] - decay[None, :], 0.0)) * dt[None, :]
            w = tl.where(j[None, :] <= i[:, None], w, 0.0).to(ROUND)
            y = tl.dot(w.to(READ), x.to(READ), input_precision="ieee")
            before = tl.dot(c, tl.trans(state.to(READ)), input_precision="ieee")
            y = tl.exp(decay_i)[:, None] * before + (y + 0.0)
            y += tl.load(skip_ptr + head) * own_x.to(tl.float32)
            out = y_ptr + token[:, None] * (H * P) + head * P + p[None, :]
            tl.store(out, y.to(y_ptr.dtype.element_ty), mask=new[:, None] & wide)


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
    heads: int = 1,
    warps: int = 4,
    stages: int = 2,
) -> Tensor:
    """y [T, H, P] in c's dtype, zeros of padding; the states of chunks that fill up are kept in their pages.

    heads, warps, stages: of a program, for tests; each head is computed by itself.
    """
    H, P, _ = of.shape
    T, dtype = len(c_TGN), c_TGN.dtype
    assert of.seen.values.dtype == dtype, f"states are seen as {of.seen.values.dtype}, c is {dtype}"
    y = torch.zeros(T, H, P, dtype=dtype, device=c_TGN.device)
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
    steps = (tiles_V2, who.starts_S1, who.past_S, who.total_S, rows)
    x, b, dt = of.x.places, of.b.places, (of.dt.page, of.dt.row, of.dt.start)
    c, c_lane = row_lanes(c_TGN)
    _pairs[(of.groups, V)](
        of.dt.values, of.b.values, c_TGN, a_H, cb, decay, *steps, rows.stride(0), *dt, *b,
        c, *sizes(of), triton.next_power_of_2(each), TILE, of.b.lane, c_lane, read,
        num_warps=8,
    )  # fmt: skip
    _rows[(H // heads, V)](
        of.x.values, of.dt.values, c_TGN, skip_H, seen.values, cb, decay, y, *steps, states,
        rows.stride(0), *x, *dt, states.stride(0), seen.places[0], seen.places[2], c,
        *sizes(of), heads, TILE, stages, of.x.lane, seen.lane, c_lane, rounding, read,
        num_warps=warps,
    )  # fmt: skip
    return y


def fold(of: Places, a_H: Tensor, who: Sequences, rounding: tl.dtype, read: tl.dtype) -> None:
    """Keep the states after the chunks that fill up. In an engine's pages few fill up in a step; in a pack all do, and
    each head has a program of its own: the chunks of a sequence wait for each other."""
    H, heads = of.shape[0], 1
    if of.x.per_page != FLAT:
        heads = next(n for n in (4, 2, 1) if H % n == 0)
    states, seen = of.states, of.seen
    _fold[(H // heads, len(who.total_S))](
        of.x.values, of.dt.values, of.b.values, a_H, states.values, who.past_S, who.total_S,
        of.x.table_SK, states.table_SK, of.x.table_SK.stride(0),
        *of.x.places, of.dt.page, of.dt.row, of.dt.start, *of.b.places,
        states.table_SK.stride(0), states.places[0], states.places[2],
        seen.values, seen.places[0], seen.places[2], *sizes(of), heads,
        of.x.lane, of.b.lane, states.lane, seen.lane, rounding, read, num_warps=8,
    )  # fmt: skip
