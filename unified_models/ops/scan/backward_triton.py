"""Gradients of the scan over flat rows, chunk by chunk: README.md has the expressions, roundings and orders of sums.

`_decays` makes again what the forward had of each chunk; `_pass_back` carries the states' gradient from each sequence's
last chunk to its first; `_rows_back` and `_readers_back` need nothing but one chunk; `_times_back` and `_heads_back`
gather what reaches the time steps and the heads. What lies between them is float32 by heads and rows, [H, R].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.pages import row_lanes
from unified_models.ops.scan.places import BFLOAT16, FLOAT32, Inputs, Launch
from unified_models.ops.scan.triton import INTERPRETED, _decay, chunks, lanes

VARYING = ["R", "x_row", "dt_row", "b_row", "c_row", "y_row", "table_row", "old"]


@triton.jit
def _chunk(chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr, u, Q: tl.constexpr):
    """Of chunk u: its sequence and number, its first row, the token of its first place, how many places have rows, and
    the first place with a new one."""
    s, number = tl.load(chunks_ptr + 2 * u), tl.load(chunks_ptr + 2 * u + 1)
    past, first = tl.load(past_ptr + s), number * Q
    row = (tl.load(base_ptr + s) + first).to(tl.int64)
    token = (tl.load(starts_ptr + s) + first - past).to(tl.int64)
    return s, number, row, token, tl.minimum(tl.load(total_ptr + s) - first, Q), past - first


@triton.jit(do_not_specialize=VARYING)
def _decays(
    dt_ptr, a_ptr, times_ptr, decay_ptr,
    chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr, R, dt_row,
    Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, QB: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """dt, and the running sum of dt * a over a chunk, of one group's heads: as the forward has them, by heads."""
    g, u = tl.program_id(0), tl.program_id(1)
    if tl.load(chunks_ptr + 2 * u) >= 0:
        _, _, row, _, count, _ = _chunk(chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr, u, Q)
        j, k = tl.arange(0, QB), tl.arange(0, HEADS)
        head, here = g * (H // G) + k, (j < count)[:, None] & (k < H // G)[None, :]
        at = dt_ptr + (row + j)[:, None] * dt_row + head[None, :]
        dt = tl.load(at, mask=here, other=0.0).to(tl.float32)
        a = tl.load(a_ptr + head, mask=k < H // G, other=0.0)
        at = head[None, :] * R + (row + j)[:, None]
        tl.store(times_ptr + at, dt, mask=here)
        tl.store(decay_ptr + at, _decay(dt, a[None, :]), mask=here)


@triton.jit(do_not_specialize=VARYING)
def _pass_back(
    dy_ptr, c_ptr, decay_ptr, seen_ptr, given_ptr, after_ptr, kept_ptr, before_ptr,
    base_ptr, starts_ptr, past_ptr, total_ptr, table_ptr, table_row, R, y_row, c_row, old,
    Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, NT: tl.constexpr,
    Y: tl.constexpr, C: tl.constexpr, GIVEN: tl.constexpr, BEFORE: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """D = e^{A_last} D' + sum_i (e^{A_i} dy_i) c_i^T of a sequence's chunks, last to first; one head, NT columns.

    after: D' of each full chunk, where its state is kept; kept: e^{A_last} sum(D' r(S)) of these columns."""
    s, part = tl.program_id(1), tl.program_id(0) % (NB // NT)
    h = tl.program_id(0) // (NB // NT)
    past, total = tl.load(past_ptr + s), tl.load(total_ptr + s)
    if total > past:
        first, chunks = past // Q, tl.cdiv(total, Q) - past // Q
        j, p, n = tl.arange(0, QB), tl.arange(0, PB), part * NT + tl.arange(0, NT)
        inside = (p[:, None] < P) & (n[None, :] < N)
        within = (h * P + p)[:, None] * N + n[None, :]
        table_at = table_ptr + s.to(tl.int64) * table_row
        decay_at = decay_ptr + h * R + tl.load(base_ptr + s)
        grad = tl.zeros((PB, NT), dtype=tl.float32)
        for k in tl.range(0, chunks, num_stages=STAGES):
            number = first + chunks - 1 - k
            start = number * Q
            full = start + Q <= total
            state = tl.load(table_at + number, mask=full, other=0).to(tl.int64)
            kept = inside & (n[None, :] < tl.where(full, N, 0))
            if GIVEN:
                at = given_ptr + (state - old) * (H * P * N) + within
                grad += tl.load(at, mask=kept, other=0.0)
            at = after_ptr + state * (H * P * N) + within
            tl.store(at, grad.to(after_ptr.dtype.element_ty), mask=kept)
            last = tl.load(decay_at + start + Q - 1, mask=full, other=0.0)
            at = tl.load(table_at + tl.maximum(number - 1, 0)).to(tl.int64) * (H * P * N)
            kept &= n[None, :] < tl.where(number > 0, N, 0)
            seen = tl.load(seen_ptr + at + within, mask=kept, other=0.0).to(tl.float32)
            to_last = tl.exp(last) * tl.sum(tl.sum(grad * seen, axis=1), axis=0)
            tl.store(kept_ptr + (state * H + h) * (NB // NT) + part, to_last, mask=full)
            there = (j < Q) & (start + j < total)
            new = there & (start + j >= past)
            token = (tl.load(starts_ptr + s) + start - past + j).to(tl.int64)
            at = dy_ptr + token[:, None] * y_row * Y + h * P + p[None, :]
            dy = tl.load(at, mask=new[:, None] & (p[None, :] < P), other=0.0).to(tl.float32)
            at = c_ptr + token[:, None] * c_row * C + h // (H // G) * N + n[None, :]
            c = tl.load(at, mask=new[:, None] & (n[None, :] < N), other=0.0).to(READ)
            decay = tl.load(decay_at + start + j, mask=there, other=0.0)
            dy = (dy * tl.exp(decay)[:, None]).to(ROUND)
            added = tl.dot(tl.trans(dy.to(READ)), c, input_precision="ieee")
            grad = tl.exp(last) * grad + added
        if BEFORE:
            at = before_ptr + s.to(tl.int64) * (H * P * N) + within
            tl.store(at, grad, mask=inside)


@triton.jit
def _faded(times_at, decay_at, i, j, count, sees, Q: tl.constexpr):
    """Of one head: dt_j; e^{A_i - A_j} where i sees j, else 0; e^{A_last - A_j}, of use where the chunk is full."""
    dt = tl.load(times_at + j, mask=j < count, other=0.0)
    decay = tl.load(decay_at + j, mask=j < count, other=0.0)
    decay_i = tl.load(decay_at + i, mask=i < count, other=0.0)
    fades = tl.exp(tl.minimum(decay_i[:, None] - decay[None, :], 0.0))
    last = tl.load(decay_at + Q - 1, mask=count == Q, other=0.0)
    return dt, tl.where(sees, fades, 0.0), tl.exp(tl.minimum(last - decay, 0.0))


@triton.jit
def _by_rows(x, dy, dt, fades, cb, ROUND: tl.constexpr, READ: tl.constexpr):
    """Of one head, by y_i = sum_j w_ij x_j: dx_j, the gradients of c_i . b_j, of dt_j but for A, and of A_i. x and dx
    are [P, J], what is of pairs [I, J]."""
    w = (cb * fades * dt[None, :]).to(ROUND)
    dx = tl.dot(tl.trans(dy), w.to(READ), input_precision="ieee")
    dw = tl.dot(dy, x, input_precision="ieee") * fades
    pairs, dw = dw * dt[None, :], dw * cb
    return dx, pairs, tl.sum(dw, axis=0), tl.sum(dw * dt[None, :], axis=1)


@triton.jit
def _by_state(x, b, after, left, ROUND: tl.constexpr, READ: tl.constexpr):
    """Of one head, by sum_j x_j b'_j^T: dx_j, db_j, and the gradient of what b_j is multiplied with. x and dx are
    [P, J], b and db [N, J]."""
    b = b.to(tl.float32)
    decayed = (b * left[None, :]).to(ROUND)
    dx = tl.dot(after, decayed.to(READ), input_precision="ieee")
    db = tl.dot(tl.trans(after), x, input_precision="ieee")
    return dx, db * left[None, :], tl.sum(db * b, axis=0)


@triton.jit
def _by_pairs(pairs, c):
    """db_j by c_i . b_j, [N, J]. It is multiplied as [J, N]: 32 rows are no wgmma, whose descriptor of c ptxas loses
    among the spilled registers of `_rows_back`."""
    return tl.trans(tl.dot(tl.trans(pairs), c, input_precision="ieee"))


@triton.jit(do_not_specialize=VARYING)
def _rows_back(
    x_ptr, b_ptr, c_ptr, skip_ptr, dy_ptr, times_ptr, decay_ptr, after_ptr,
    dx_ptr, db_ptr, pairs_ptr, direct_ptr, late_ptr, own_ptr, reads_ptr,
    chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr, table_ptr, table_row,
    R, x_row, b_row, c_row, y_row,
    Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, JB: tl.constexpr,
    X: tl.constexpr, B: tl.constexpr, C: tl.constexpr, Y: tl.constexpr,
    ROUND: tl.constexpr, READ: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dx and db of JB places of a chunk and the heads of one group, in ascending order; those of c_i . b_j, in `pairs`;
    and by heads what reaches dt_j but for A (direct), A_last (late), skip (own) and A_i (reads, of these j only)."""
    u, g, tile = tl.program_id(1), tl.program_id(0) // (QB // JB), tl.program_id(0) % (QB // JB)
    if tl.load(chunks_ptr + 2 * u) >= 0:
        s, number, row, token, count, old = _chunk(
            chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr, u, Q
        )
        if tile * JB < count:
            i, j, p, n = tl.arange(0, QB), tile * JB + tl.arange(0, JB), tl.arange(0, PB), tl.arange(0, NB)  # fmt: skip
            there, new, full = j < count, (i < count) & (i >= old), count == Q
            b_at = b_ptr + (row + j)[None, :] * b_row * B + g * N + n[:, None]
            b = tl.load(b_at, mask=there[None, :] & (n[:, None] < N), other=0.0)
            c_at = c_ptr + (token + i)[:, None] * c_row * C + g * N + n[None, :]
            c = tl.load(c_at, mask=new[:, None] & (n[None, :] < N), other=0.0)
            cb = tl.dot(c.to(READ), b.to(READ), input_precision="ieee")
            sees = (j[None, :] <= i[:, None]) & there[None, :] & new[:, None]
            state = tl.load(table_ptr + s.to(tl.int64) * table_row + number, mask=full, other=0)
            after_at = after_ptr + state.to(tl.int64) * (H * P * N)
            mine, inside = there[None, :] & (p[:, None] < P), n[None, :] < tl.where(full, N, 0)
            db = tl.zeros((NB, JB), dtype=tl.float32)
            pairs = tl.zeros((QB, JB), dtype=tl.float32)
            for h in tl.range(g * (H // G), (g + 1) * (H // G), num_stages=STAGES):
                x_at = x_ptr + (row + j)[None, :] * x_row * X + h * P + p[:, None]
                x = tl.load(x_at, mask=mine, other=0.0)
                dy_at = dy_ptr + (token + i)[:, None] * y_row * Y + h * P + p[None, :]
                dy = tl.load(dy_at, mask=new[:, None] & (p[None, :] < P), other=0.0).to(READ)
                at = row + h * R
                dt, fades, left = _faded(times_ptr + at, decay_ptr + at, i, j, count, sees, Q)
                dx, of_pairs, direct, reads = _by_rows(x.to(READ), dy, dt, fades, cb, ROUND, READ)
                pairs += of_pairs
                tl.store(reads_ptr + tile * R * H + at + i, reads, mask=i < count)
                state_at = after_at + (h * P + p)[:, None] * N + n[None, :]
                after = tl.load(state_at, mask=(p[:, None] < P) & inside, other=0.0).to(READ)
                of_x, of_b, to_left = _by_state(x.to(READ), b, after, left * dt, ROUND, READ)
                dx, db, left = dx + of_x, db + of_b, left * to_left
                dy_at = dy_ptr + (token + j)[None, :] * y_row * Y + h * P + p[:, None]
                own_dy = tl.load(dy_at, mask=mine & (j >= old)[None, :], other=0.0).to(tl.float32)
                dx += tl.load(skip_ptr + h) * own_dy
                tl.store(own_ptr + at + j, tl.sum(own_dy * x.to(tl.float32), axis=0), mask=there)
                tl.store(direct_ptr + at + j, direct + left, mask=there)
                tl.store(late_ptr + at + j, left * dt, mask=there)
                dx_at = dx_ptr + (row + j)[None, :] * (H * P) + h * P + p[:, None]
                tl.store(dx_at, dx.to(dx_ptr.dtype.element_ty), mask=mine)
            pairs = pairs.to(ROUND)
            at = pairs_ptr + ((u * G + g).to(tl.int64) * QB + i[:, None]) * QB + j[None, :]
            tl.store(at, pairs)
            c = tl.load(c_at, mask=new[:, None] & (n[None, :] < N), other=0.0)
            db += _by_pairs(pairs.to(READ), c.to(READ))
            db_at = db_ptr + (row + j)[None, :] * (G * N) + g * N + n[:, None]
            tl.store(db_at, db.to(db_ptr.dtype.element_ty), mask=there[None, :] & (n[:, None] < N))


@triton.jit(do_not_specialize=VARYING)
def _readers_back(
    b_ptr, c_ptr, dy_ptr, decay_ptr, seen_ptr, pairs_ptr, dc_ptr, read_ptr,
    chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr, table_ptr, table_row,
    R, b_row, c_row, y_row,
    Q: tl.constexpr, H: tl.constexpr, P: tl.constexpr, G: tl.constexpr, N: tl.constexpr,
    QB: tl.constexpr, PB: tl.constexpr, NB: tl.constexpr, IB: tl.constexpr,
    B: tl.constexpr, C: tl.constexpr, Y: tl.constexpr, READ: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dc of IB places of a chunk: what comes by the state, head by head in ascending order, then by the pairs. read:
    what reaches A_i by e^{A_i} (c_i . r(S)); the first chunk of a sequence has no state, and no `read`."""
    u, g, tile = tl.program_id(1), tl.program_id(0) // (QB // IB), tl.program_id(0) % (QB // IB)
    if tl.load(chunks_ptr + 2 * u) >= 0:
        s, number, row, token, count, old = _chunk(
            chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr, u, Q
        )
        if tile * IB < count:
            i, j, p, n = tile * IB + tl.arange(0, IB), tl.arange(0, QB), tl.arange(0, PB), tl.arange(0, NB)  # fmt: skip
            new = (i < count) & (i >= old)
            mine = new[:, None] & (n[None, :] < N)
            c_at = c_ptr + (token + i)[:, None] * c_row * C + g * N + n[None, :]
            c = tl.load(c_at, mask=mine, other=0.0)
            before = tl.maximum(number - 1, 0)
            state = tl.load(table_ptr + s.to(tl.int64) * table_row + before).to(tl.int64)
            dc = tl.zeros((IB, NB), dtype=tl.float32)
            heads = tl.where(number > 0, H // G, 0)
            for h in tl.range(g * (H // G), g * (H // G) + heads, num_stages=STAGES):
                dy_at = dy_ptr + (token + i)[:, None] * y_row * Y + h * P + p[None, :]
                dy = tl.load(dy_at, mask=new[:, None] & (p[None, :] < P), other=0.0)
                at = seen_ptr + state * (H * P * N) + (h * P + p)[:, None] * N + n[None, :]
                seen = tl.load(at, mask=(p[:, None] < P) & (n[None, :] < N), other=0.0)
                at = row + h * R + i
                decay = tl.exp(tl.load(decay_ptr + at, mask=i < count, other=0.0))
                of_c = tl.dot(dy.to(READ), seen.to(READ), input_precision="ieee")
                of_c *= decay[:, None]
                dc += of_c
                tl.store(read_ptr + at, tl.sum(of_c * c.to(tl.float32), axis=1), mask=i < count)
            at = pairs_ptr + ((u * G + g).to(tl.int64) * QB + i[:, None]) * QB + j[None, :]
            pairs = tl.load(at, mask=(j[None, :] <= i[:, None]) & new[:, None], other=0.0)
            b_at = b_ptr + (row + j)[:, None] * b_row * B + g * N + n[None, :]
            b = tl.load(b_at, mask=(j < count)[:, None] & (n[None, :] < N), other=0.0)
            dc += tl.dot(pairs.to(READ), b.to(READ), input_precision="ieee")
            dc_at = dc_ptr + (token + i)[:, None] * (G * N) + g * N + n[None, :]
            tl.store(dc_at, dc.to(dc_ptr.dtype.element_ty), mask=mine)


@triton.jit(do_not_specialize=[*VARYING, "U"])
def _times_back(
    a_ptr, times_ptr, direct_ptr, late_ptr, own_ptr, reads_ptr, read_ptr, kept_ptr,
    ddt_ptr, parts_ptr, U, chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr,
    table_ptr, table_row, R,
    Q: tl.constexpr, H: tl.constexpr, G: tl.constexpr, QB: tl.constexpr, JB: tl.constexpr,
    PARTS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """ddt of one chunk and the heads of one group; this chunk's part of a's and skip's gradients."""
    g, u = tl.program_id(0), tl.program_id(1)
    if tl.load(chunks_ptr + 2 * u) >= 0:
        s, number, row, _, count, _ = _chunk(
            chunks_ptr, base_ptr, starts_ptr, past_ptr, total_ptr, u, Q
        )
        j, k = tl.arange(0, QB), tl.arange(0, HEADS)
        head, real, full = g * (H // G) + k, k < H // G, count == Q
        here = real[:, None] & (j < count)[None, :]
        at = head[:, None] * R + (row + j)[None, :]
        dt = tl.load(times_ptr + at, mask=here, other=0.0)
        direct = tl.load(direct_ptr + at, mask=here, other=0.0)
        grad = tl.load(
            read_ptr + at, mask=here & (j[None, :] < tl.where(number > 0, Q, 0)), other=0.0
        )
        for tile in tl.static_range(0, QB // JB):
            seen = here & (j[None, :] >= tile * JB)
            grad += tl.load(reads_ptr + tile * R * H + at, mask=seen, other=0.0)
        grad -= dt * direct
        last = tl.sum(tl.load(late_ptr + at, mask=here, other=0.0), axis=1)
        state = tl.load(table_ptr + s.to(tl.int64) * table_row + number, mask=full, other=0)
        kept_at = kept_ptr + (state.to(tl.int64) * H + head) * PARTS
        for part in tl.static_range(0, PARTS):
            last += tl.load(kept_at + part, mask=k < tl.where(full, H // G, 0), other=0.0)
        grad += tl.where(j[None, :] == tl.where(full, Q - 1, -1), last[:, None], 0.0)
        grad = tl.cumsum(grad.to(tl.float64), axis=1, reverse=True).to(tl.float32)
        a = tl.load(a_ptr + head, mask=real, other=0.0)
        out = ddt_ptr + (row + j)[None, :] * H + head[:, None]
        tl.store(out, (direct + a[:, None] * grad).to(ddt_ptr.dtype.element_ty), mask=here)
        own = tl.load(own_ptr + at, mask=here, other=0.0)
        out = parts_ptr + u * H + head
        tl.store(out, tl.sum(tl.where(here, grad * dt, 0.0), axis=1), mask=real)
        tl.store(out + U * H, tl.sum(own, axis=1), mask=real)


@triton.jit(do_not_specialize=["U"])
def _heads_back(parts_ptr, out_ptr, U, H: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """The parts of all chunks, BLOCK after BLOCK; of a, then of skip."""
    which, head = tl.program_id(1), tl.program_id(0) * HEADS + tl.arange(0, HEADS)
    total = tl.zeros((HEADS,), dtype=tl.float32)
    for start in range(0, U, BLOCK):
        u = start + tl.arange(0, BLOCK)
        at = parts_ptr + (which * U + u)[:, None] * H + head[None, :]
        part = tl.load(at, mask=(u < U)[:, None] & (head < H)[None, :], other=0.0)
        total += tl.sum(part, axis=0)
    tl.store(out_ptr + which * H + head, total, mask=head < H)


def scan_backward(
    of: Inputs,
    dy_THP: Tensor | None,
    given_FHPN: Tensor | None,
    before: bool = False,
    launch: Launch | None = None,
) -> tuple[Tensor, ...]:
    """The gradients of x, dt, b, c, a and skip, each in its dtype, and of the states before the step, float32
    [S, H, P, N], if `before` (else of no rows).

    dy_THP: of y, in c's dtype; given_FHPN: of the states after the chunks that fill up, float32; None: zeros.
    """
    x, b, c = of.x_RHP, of.b_RGN, of.c_TGN
    (R, H, P), (T, _, N), S = x.shape, c.shape, len(of.base_S)
    dy = x.new_zeros(T, H, P, dtype=c.dtype) if dy_THP is None else in_rows(dy_THP)
    # Rows of chunks that were full before have no gradient; where there are none, every row is written.
    dx, ddt, db = (
        rows.new_empty(rows.shape) if R == T else rows.new_zeros(rows.shape)
        for rows in (x, of.dt_RH, b)
    )
    dc = c.new_empty(c.shape)
    first = x.new_zeros(S if before else 0, H, P, N, dtype=torch.float32)
    heads = x.new_zeros(2, H, dtype=torch.float32)
    if T:
        launch = launch or (BFLOAT16 if c.dtype == torch.bfloat16 else FLOAT32)
        _launch(of, launch, dy, given_FHPN, (dx, ddt, db, dc, first, heads))
    return dx, ddt, db, dc, heads[0].to(of.a_H.dtype), heads[1].to(of.skip_H.dtype), first


def _launch(
    of: Inputs, how: Launch, dy: Tensor, given: Tensor | None, outs: tuple[Tensor, ...]
) -> None:
    x, b, c, seen = of.x_RHP, of.b_RGN, of.c_TGN, of.seen_FX
    (R, H, P), (T, G, N), S, Q = x.shape, c.shape, len(of.base_S), of.chunk
    dx, ddt, db, dc, first, heads = outs
    QB, PB, NB, each = lanes(Q), lanes(P), lanes(N), triton.next_power_of_2(H // G)
    NT, JB, IB = min(how.columns, NB), min(how.rows, QB), min(how.readers, QB)
    rounding = tl.bfloat16 if c.dtype == torch.bfloat16 else tl.float32
    read = tl.float32 if INTERPRETED else rounding
    sizes = (Q, H, P, G, N, QB, PB, NB)
    listed = chunks(of.who, T, Q)
    U = len(listed)
    places = (of.base_S, of.who.starts_S1, of.who.past_S, of.who.total_S)
    table = (of.table_SK, of.table_SK.stride(0))
    (x_row, x_lane), (b_row, b_lane) = row_lanes(x), row_lanes(b)
    (c_row, c_lane), (y_row, y_lane) = row_lanes(c), row_lanes(dy)
    tiles, old = QB // JB, len(seen) - (0 if given is None else len(given))
    times, decay, direct, late, own, read_, *reads = x.new_empty(6 + tiles, H, R, dtype=torch.float32)  # fmt: skip
    after = torch.empty_like(seen)
    kept = x.new_empty(max(len(seen), 1), H, NB // NT, dtype=torch.float32)
    pairs = c.new_empty(U, G, QB, QB)
    parts = x.new_zeros(2, U, H, dtype=torch.float32)
    _decays[(G, U)](
        of.dt_RH, of.a_H, times, decay, listed, *places, R, of.dt_RH.stride(0), Q, H, G, QB, each,
        num_warps=8,
    )  # fmt: skip
    _pass_back[(H * (NB // NT), S)](
        dy, c, decay, seen, kept if given is None else given, after, kept, first, *places, *table,
        R, y_row, c_row, old, *sizes, NT, y_lane, c_lane, given is not None, len(first) > 0,
        rounding, read, how.stages[0], num_warps=how.warps[0],
    )  # fmt: skip
    _rows_back[(G * tiles, U)](
        x, b, c, of.skip_H, dy, times, decay, after, dx, db, pairs, direct, late, own, reads[0],
        listed, *places, *table, R, x_row, b_row, c_row, y_row, *sizes, JB,
        x_lane, b_lane, c_lane, y_lane, rounding, read, how.stages[1], num_warps=how.warps[1],
    )  # fmt: skip
    _readers_back[(G * (QB // IB), U)](
        b, c, dy, decay, seen, pairs, dc, read_, listed, *places, *table, R, b_row, c_row, y_row,
        *sizes, IB, b_lane, c_lane, y_lane, read, how.stages[2], num_warps=how.warps[2],
    )  # fmt: skip
    _times_back[(G, U)](
        of.a_H, times, direct, late, own, reads[0], read_, kept, ddt, parts, U, listed, *places,
        *table, R, Q, H, G, QB, JB, NB // NT, each, num_warps=4,
    )  # fmt: skip
    width = min(16, triton.next_power_of_2(H))
    _heads_back[(triton.cdiv(H, width), 2)](parts, heads, U, H, width, 64, num_warps=4)


def in_rows(x: Tensor) -> Tensor:
    """x, or a copy whose rows are whole; they may lie further apart than they are long."""
    return x if x[:1].is_contiguous() else x.contiguous()
