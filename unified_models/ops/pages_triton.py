"""Which sequence a token is of, and rows into pages. Whole numbers and copies: no bit depends on how."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.pages import Pages, Sequences, row_lanes

TOKENS = 64
CHANNELS = 1024


@triton.jit(do_not_specialize=["T", "S"])
def _owners(
    starts_ptr,
    past_ptr,
    sequence_ptr,
    position_ptr,
    T,
    S,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The number of sequences that end at or before a token is the number of its own."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    s = tl.zeros((TOKENS,), dtype=tl.int32)
    for first in range(0, S, BLOCK):
        at = first + tl.arange(0, BLOCK)
        end = tl.load(starts_ptr + 1 + at, mask=at < S, other=2147483647)
        s += tl.sum((end[None, :] <= t[:, None]).to(tl.int32), axis=1)
    known = (t < T) & (s < S)
    start = tl.load(starts_ptr + s, mask=known, other=0)
    past = tl.load(past_ptr + s, mask=known, other=0)
    tl.store(sequence_ptr + t, tl.where(known, s, -1), mask=t < T)
    tl.store(position_ptr + t, tl.where(known, past + t - start, 0), mask=t < T)


def owners(starts_S1: Tensor, past_S: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """sequence_T, position_T: int32; -1 and 0 behind the last sequence's tokens."""
    sequence_T = torch.empty(tokens, dtype=torch.int32, device=past_S.device)
    position_T = torch.empty_like(sequence_T)
    if tokens:
        _owners[(triton.cdiv(tokens, TOKENS),)](
            starts_S1, past_S, sequence_T, position_T, tokens, len(past_S), 128, TOKENS, num_warps=4
        )
    return sequence_T, position_T


@triton.jit(do_not_specialize=["table_row"])
def _write(
    sequence_ptr, position_ptr, total_ptr, table_ptr, table_row,
    a_ptr, a_rows, a_stride, a_page, a_row, a_start, A: tl.constexpr,
    A_LANE: tl.constexpr, A_TO: tl.constexpr,
    b_ptr, b_rows, b_stride, b_page, b_row, b_start, B: tl.constexpr,
    B_LANE: tl.constexpr, B_TO: tl.constexpr,
    c_ptr, c_rows, c_stride, c_page, c_row, c_start, C: tl.constexpr,
    C_LANE: tl.constexpr, C_TO: tl.constexpr,
    PER_PAGE: tl.constexpr, RING: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """One token's part of up to three rows; A, B, C: their values."""
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    s = tl.load(sequence_ptr + t)
    if s >= 0:
        p = tl.load(position_ptr + t)
        end = tl.minimum(tl.load(total_ptr + s), (p // PER_PAGE + 1) * PER_PAGE)
        if p >= end - RING:
            page = tl.load(table_ptr + s.to(tl.int64) * table_row + p // PER_PAGE).to(tl.int64)
            row = (p % PER_PAGE % RING).to(tl.int64)
            n = part * CHANNELS + tl.arange(0, CHANNELS)
            if part * CHANNELS < A:
                new = tl.load(a_rows + t * a_stride * A_LANE + n, mask=n < A)
                at = a_ptr + (page * a_page + row * a_row + a_start) * A_TO + n
                tl.store(at, new.to(a_ptr.dtype.element_ty), mask=n < A)
            if part * CHANNELS < B:
                new = tl.load(b_rows + t * b_stride * B_LANE + n, mask=n < B)
                at = b_ptr + (page * b_page + row * b_row + b_start) * B_TO + n
                tl.store(at, new.to(b_ptr.dtype.element_ty), mask=n < B)
            if part * CHANNELS < C:
                new = tl.load(c_rows + t * c_stride * C_LANE + n, mask=n < C)
                at = c_ptr + (page * c_page + row * c_row + c_start) * C_TO + n
                tl.store(at, new.to(c_ptr.dtype.element_ty), mask=n < C)


def write(who: Sequences, pages: Sequence[Pages], rows: Sequence[Tensor]) -> None:
    """See `pages.write`; at most three."""
    first, widest, args = pages[0], 0, list[object]()
    for i in range(3):
        if i < len(pages):
            to, new = pages[i], rows[i]
            assert (to.per_page, to.ring) == (first.per_page, first.ring), "rows of one table"
            new = new if new[:1].is_contiguous() else new.contiguous()
            width = new.shape[1:].numel()
            stride, lane = row_lanes(new)
            args += [to.values, new, stride, *to.places, width, lane, to.lane]
            widest = max(widest, width)
        else:
            args += [first.values, first.values, 0, 0, 0, 0, 0, 1, 1]
    tokens = len(rows[0])
    if tokens:
        _write[(tokens, triton.cdiv(widest, CHANNELS))](
            who.sequence_T, who.position_T, who.total_S, first.table_SK, first.table_SK.stride(0),
            *args, first.per_page, first.ring, CHANNELS, num_warps=4,
        )  # fmt: skip
