"""The convolution for any GPU that Triton knows: written adds in the order of README.md, one channel of one token at a
time, so no bit depends on the tiling."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.pages import Pages, Sequences, row_lanes

TOKENS, CHANNELS = 4, 256


@triton.jit(do_not_specialize=["T", "table_row", "page", "x_row"])
def _conv(
    x_ptr, old_ptr, taps_ptr, bias_ptr, out_ptr, sequence_ptr, position_ptr, past_ptr, table_ptr,
    T, x_row, table_row, page, row, start, C,
    PER_PAGE: tl.constexpr, RING: tl.constexpr, X: tl.constexpr, OLD: tl.constexpr,
    TAPS: tl.constexpr, BIAS: tl.constexpr,
    TOKENS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """A token of this step is read from x, an earlier one from its page, one before the start is 0."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    s = tl.load(sequence_ptr + t, mask=t < T, other=-1)
    p = tl.load(position_ptr + t, mask=t < T, other=0)
    past = tl.load(past_ptr + s, mask=s >= 0, other=0)
    known, inside = (s >= 0)[:, None], (c < C)[None, :]
    total = tl.zeros((TOKENS, CHANNELS), dtype=tl.float32)
    if BIAS:
        total += tl.load(bias_ptr + c, mask=c < C, other=0.0)[None, :]
    for k in tl.static_range(TAPS):
        q = p - (TAPS - 1) + k
        new = known & (q >= past)[:, None] & inside
        old = known & ((q >= 0) & (q < past))[:, None] & inside
        at = (t - (TAPS - 1) + k) * x_row * X
        seen = tl.load(x_ptr + at[:, None] + c[None, :], mask=new, other=0.0).to(tl.float32)
        q = tl.maximum(q, 0)
        number = tl.load(
            table_ptr + s.to(tl.int64) * table_row + q // PER_PAGE,
            mask=(s >= 0) & (q < past),
            other=0,
        )
        at = number.to(tl.int64) * page + (q % PER_PAGE % RING).to(tl.int64) * row + start
        at = at * OLD
        seen += tl.load(old_ptr + at[:, None] + c[None, :], mask=old, other=0.0).to(tl.float32)
        tap = tl.load(taps_ptr + c * TAPS + k, mask=c < C, other=0.0)
        total += tap[None, :] * seen
    tl.store(out_ptr + t[:, None] * C + c[None, :], total, mask=(t < T)[:, None] & inside)


def conv(
    x_TC: Tensor, old: Pages, taps_CK: Tensor, bias_C: Tensor | None, who: Sequences
) -> Tensor:
    """float32 [T, C]. x: rows of this step, which may lie apart; old: of earlier tokens; both in the record's dtype."""
    T, C = x_TC.shape
    if x_TC.stride(1) != 1:
        x_TC = x_TC.contiguous()
    out = torch.empty(T, C, dtype=torch.float32, device=x_TC.device)
    x_row, lane = row_lanes(x_TC)
    if T:
        _conv[(triton.cdiv(T, TOKENS), triton.cdiv(C, CHANNELS))](
            x_TC, old.values, taps_CK, taps_CK if bias_C is None else bias_C, out,
            who.sequence_T, who.position_T, who.past_S, old.table_SK,
            T, x_row, old.table_SK.stride(0), *old.places, C,
            old.per_page, old.ring, lane, old.lane, taps_CK.shape[1], bias_C is not None,
            TOKENS, CHANNELS, num_warps=4,
        )  # fmt: skip
    return out
