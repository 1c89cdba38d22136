"""Windows that close in a step, for any GPU that Triton knows: which they are, their gated sums read where tokens lie,
and norm and rope of those.

The window's sums are written adds, one channel by itself, oldest token first: no tiling and no alignment moves them.
The one tree, that of the norm, is over a row of own memory, whose layout follows from D alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.pages import Pages, Sequences, row_lanes
from unified_models.ops.rope import Rope, frequencies
from unified_models.ops.rows import aligned

CHANNELS = 128
"""Of an entry, summed by one program."""
ENTRIES = 64
SEQUENCES = 128


@triton.jit(do_not_specialize=["S", "U"])
def _closing(
    past_ptr, total_ptr, sequence_ptr, number_ptr, S, U,
    STRIDE: tl.constexpr, SEQUENCES: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Windows of a sequence end at the running count; the sequences that end at or before u come before its own."""
    u = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    owner = tl.zeros((ENTRIES,), dtype=tl.int32)
    start = tl.zeros((ENTRIES,), dtype=tl.int32)
    before = 0
    for first in range(0, S, SEQUENCES):
        s = first + tl.arange(0, SEQUENCES)
        past = tl.load(past_ptr + s, mask=s < S, other=0)
        total = tl.load(total_ptr + s, mask=s < S, other=0)
        counts = total // STRIDE - past // STRIDE
        end = before + tl.cumsum(counts, axis=0)
        passed = (s < S)[None, :] & (end[None, :] <= u[:, None])
        owner += tl.sum(passed.to(tl.int32), axis=1)
        start = tl.maximum(start, tl.max(tl.where(passed, end[None, :], 0), axis=1))
        before += tl.sum(counts, axis=0)
    known = (u < U) & (owner < S)
    past = tl.load(past_ptr + owner, mask=known, other=0)
    tl.store(sequence_ptr + u, tl.where(known, owner, -1), mask=u < U)
    tl.store(number_ptr + u, tl.where(known, past // STRIDE + u - start, 0), mask=u < U)


def closing(who: Sequences, tokens: int, stride: int) -> tuple[Tensor, Tensor]:
    """sequence_U, number_U: the windows that close in this step, sequence after sequence, ascending; int32. -1 and 0
    behind them, as many as there could be in a step of so many tokens: min(T, T // stride + S)."""
    S = len(who.past_S)
    U = min(tokens, tokens // stride + S)
    sequence_U = torch.empty(U, dtype=torch.int32, device=who.past_S.device)
    number_U = torch.empty_like(sequence_U)
    if U:
        _closing[(triton.cdiv(U, ENTRIES),)](
            who.past_S, who.total_S, sequence_U, number_U, S, U,
            stride, SEQUENCES, ENTRIES, num_warps=4,
        )  # fmt: skip
    return sequence_U, number_U


@triton.jit
def _read(
    kv_at, gate_at, bias_at, open_at, table_at, p, past, n,
    kv_row, gate_row, page, row, start,
    D: tl.constexpr, C: tl.constexpr, X: tl.constexpr, G: tl.constexpr, OLD: tl.constexpr,
    PER_PAGE: tl.constexpr, RING: tl.constexpr,
):  # fmt: skip
    """The values and gates of the token at position p: of this step, or an earlier one from its page, whose gates hold
    the bias. Before the start: 0 and -inf. The first four: where the sequence's position 0 would be."""
    new = n < tl.where(p >= past, D, 0)
    old = n < tl.where((p >= 0) & (p < past), D, 0)
    t = p.to(tl.int64)
    value = tl.load(kv_at + t * kv_row * X, mask=new, other=0.0)
    gate = tl.load(gate_at + t * gate_row * G, mask=new, other=0.0)
    gate += tl.load(bias_at, mask=new, other=0.0)
    q = tl.maximum(p, 0)
    number = tl.load(table_at + q // PER_PAGE, mask=(p >= 0) & (p < past), other=0)
    at = (number.to(tl.int64) * page + (q % PER_PAGE % RING).to(tl.int64) * row + start) * OLD
    value += tl.load(open_at + at, mask=old, other=0.0)
    gate_old = tl.load(open_at + C + at, mask=old, other=0.0)
    gate = tl.where(p >= past, gate, tl.where(p >= 0, gate_old, float("-inf")))
    return value, gate


@triton.jit(do_not_specialize=["table_row", "kv_row", "gate_row", "page"])
def _pool(
    kv_ptr, gate_ptr, bias_ptr, open_ptr, out_ptr, sequence_ptr, number_ptr, starts_ptr, past_ptr,
    table_ptr, kv_row, gate_row, table_row, page, row, start,
    D: tl.constexpr, STRIDE: tl.constexpr, SPAN: tl.constexpr, UNROLL: tl.constexpr,
    X: tl.constexpr, G: tl.constexpr, OLD: tl.constexpr,
    PER_PAGE: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out[u] = sum_j e_j c_j / sum_j e_j with e_j = exp(z_j - max z), channel by channel, j ascending."""
    u = tl.program_id(0).to(tl.int64)
    s = tl.load(sequence_ptr + u).to(tl.int64)
    if s >= 0:
        C: tl.constexpr = D * SPAN // STRIDE
        n = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
        past = tl.load(past_ptr + s)
        begin = (tl.load(starts_ptr + s) - past).to(tl.int64)
        oldest = (tl.load(number_ptr + u) + 1) * STRIDE - SPAN
        kv_at, gate_at = kv_ptr + begin * kv_row * X + n, gate_ptr + begin * gate_row * G + n
        table_at = table_ptr + s * table_row
        top = tl.full((CHANNELS,), float("-inf"), dtype=tl.float32)
        for first in range(0, SPAN, UNROLL):
            for j in tl.static_range(UNROLL):
                # The older half of an overlapping window is read in the first channels.
                shift = (first + j) // STRIDE * D
                _, gate = _read(
                    kv_at + shift, gate_at + shift, bias_ptr + (first + j) % STRIDE * C + shift + n,
                    open_ptr + shift + n, table_at, oldest + first + j, past, n,
                    kv_row, gate_row, page, row, start, D, C, X, G, OLD, PER_PAGE, RING,
                )  # fmt: skip
                top = tl.maximum(top, gate)
        below = tl.zeros((CHANNELS,), dtype=tl.float32)
        above = tl.zeros((CHANNELS,), dtype=tl.float32)
        for first in range(0, SPAN, UNROLL):
            for j in tl.static_range(UNROLL):
                shift = (first + j) // STRIDE * D
                value, gate = _read(
                    kv_at + shift, gate_at + shift, bias_ptr + (first + j) % STRIDE * C + shift + n,
                    open_ptr + shift + n, table_at, oldest + first + j, past, n,
                    kv_row, gate_row, page, row, start, D, C, X, G, OLD, PER_PAGE, RING,
                )  # fmt: skip
                e = tl.exp(gate - top)
                below += e
                above += e * value
        tl.store(out_ptr + u * D + n, tl.div_rn(above, below), mask=n < D)


@triton.jit
def _finish(
    x_ptr, out_ptr, sequence_ptr, number_ptr, norm_ptr, frequencies_ptr, eps,
    D: tl.constexpr, STRIDE: tl.constexpr, ROPE: tl.constexpr, HALVES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """RMSNorm of one entry, then rope at number * STRIDE; zeros where there is none."""
    u = tl.program_id(0).to(tl.int64)
    s, n = tl.load(sequence_ptr + u), tl.arange(0, BLOCK)
    if s >= 0:
        x = tl.load(x_ptr + u * D + n, mask=n < D, other=0.0)
        r = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        y = x * r * tl.load(norm_ptr + n, mask=n < D, other=0.0)
        m, turned = n - (D - ROPE), (n >= D - ROPE) & (n < D)
        if HALVES:
            second, pair, step = m >= ROPE // 2, m % (ROPE // 2), ROPE // 2
        else:
            second, pair, step = m % 2 == 1, m // 2, 1
        other = tl.where(second, n - step, n + step)
        z = tl.load(x_ptr + u * D + other, mask=turned, other=0.0) * r
        z = z * tl.load(norm_ptr + other, mask=turned, other=0.0)
        position = (tl.load(number_ptr + u) * STRIDE).to(tl.float32)
        angle = position * tl.load(frequencies_ptr + pair, mask=turned, other=0.0)
        cos, sin = tl.cos(angle), tl.sin(angle)
        rotated = tl.where(second, z * sin + y * cos, y * cos - z * sin)
        tl.store(out_ptr + u * D + n, tl.where(turned, rotated, y), mask=n < D)
    else:
        tl.store(out_ptr + u * D + n, tl.zeros((BLOCK,), dtype=tl.float32), mask=n < D)


def compress(
    kv_TC: Tensor,
    gate_TC: Tensor,
    open: Pages,
    who: Sequences,
    sequence_U: Tensor,
    number_U: Tensor,
    *,
    stride: int,
    overlap: bool,
    dim: int,
    bias: Tensor,
    norm: Tensor,
    eps: float,
    rope_: Rope,
) -> Tensor:
    """entries_UD, float32; see `ops.compress.compress_pages`."""
    U, span = len(sequence_U), stride * (2 if overlap else 1)
    pooled = torch.empty(U, dim, dtype=torch.float32, device=kv_TC.device)
    out = torch.empty_like(pooled)
    if not U:
        return out
    kv, gate = (x if x.stride(1) == 1 else x.contiguous() for x in (kv_TC, gate_TC))
    (kv_row, kv_lane), (gate_row, gate_lane) = row_lanes(kv), row_lanes(gate)
    unroll = next(n for n in (8, 4, 2, 1) if span % n == 0)
    _pool[(U, triton.cdiv(dim, CHANNELS))](
        kv, gate, bias.contiguous(), open.values, pooled, sequence_U, number_U,
        who.starts_S1, who.past_S, open.table_SK,
        kv_row, gate_row, open.table_SK.stride(0), *open.places,
        dim, stride, span, unroll, kv_lane, gate_lane, open.lane,
        open.per_page, open.ring, CHANNELS, num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    block = max(triton.next_power_of_2(dim), 16)
    _finish[(U,)](
        pooled, out, sequence_U, number_U, aligned(norm.float()),
        frequencies(rope_, kv.device), eps, dim, stride, rope_.dim, rope_.halves, block,
        num_warps=min(max(block // 256, 1), 8), enable_fp_fusion=False,
    )  # fmt: skip
    return out
