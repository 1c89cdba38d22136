"""Rows to the bytes of their records (formats/records.py), and into pages. Every value is rounded by whole-number
arithmetic on its bits, and maxima know no order: a byte depends on its row alone, on any GPU and in any tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.formats.records import LatentFP8, PlainRecord, Record, VectorFP8
from unified_models.ops.pages import Pages, Sequences, row_lanes, write

ROWS = 8
"""Short rows of a program."""


@triton.jit
def _bfloat16(x):
    """float32 x as the nearest bfloat16, to even, in float32. NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
    return tl.where(x != x, x, near.to(tl.float32, bitcast=True))


@triton.jit
def _largest(x, axis: tl.constexpr):
    """max |x|; NaN where there is one, as its bits are above all others'."""
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=axis)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _carried(largest):
    """The bits of max(largest, 1e-10) / 448 plus those below an exponent: a mantissa that is not zero carries."""
    floored = tl.where(largest < 1e-10, 1e-10, largest)
    return tl.div_rn(floored, 448.0).to(tl.int32, bitcast=True) + 0x7FFFFF


@triton.jit
def _codes(x):
    """e4m3 codes, int32, of float32 x: clamped to +-448, then to the nearest, to even. NaN stays NaN."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Below 2^-6 codes are 2^-9 apart, as floats from 2^14 on are: one addition rounds.
    small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < (121 << 23), small, normal)
    return tl.where(x != x, 0x7F, code) | ((bits >> 24) & 0x80)


@triton.jit
def _values(codes):
    """float32 of e4m3 codes."""
    low = codes & 0x7F
    normal = ((low << 20) + (120 << 23)).to(tl.float32, bitcast=True)
    size = tl.where(low < 8, low.to(tl.float32) * 0.001953125, normal)
    # Minus zero is one of them, and 0 - 0 is not.
    signed = size.to(tl.int32, bitcast=True) | ((codes & 0x80) << 24)
    return tl.where(low == 0x7F, float("nan"), signed.to(tl.float32, bitcast=True))


@triton.jit
def _place(
    u, known, sequence_ptr, number_ptr, total_ptr, table_ptr, table_row, page, row, start,
    PER_PAGE: tl.constexpr, RING: tl.constexpr, LANE: tl.constexpr, PAGED: tl.constexpr,
):  # fmt: skip
    """Where row u goes, in elements, and whether it is kept. Not PAGED: one behind the other."""
    if PAGED:
        s = tl.load(sequence_ptr + u, mask=known, other=-1).to(tl.int64)
        known = known & (s >= 0)
        p = tl.load(number_ptr + u, mask=known, other=0)
        total = tl.load(total_ptr + s, mask=known, other=0)
        known = known & (p >= tl.minimum(total, (p // PER_PAGE + 1) * PER_PAGE) - RING)
        number = tl.load(table_ptr + s * table_row + p // PER_PAGE, mask=known, other=0)
        at = number.to(tl.int64) * page + (p % PER_PAGE % RING).to(tl.int64) * row + start
        return at * LANE, known
    else:
        return u * row * LANE, known


@triton.jit(do_not_specialize=["U", "table_row"])
def _vector(
    rows_ptr, out_ptr, sequence_ptr, number_ptr, total_ptr, table_ptr,
    U, stride, table_row, page, row, start,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, X: tl.constexpr,
    PER_PAGE: tl.constexpr, RING: tl.constexpr, LANE: tl.constexpr, PAGED: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """VectorFP8: D codes, and their scale as float32. Not BYTES: what a reader gets back."""
    u = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, BLOCK)
    known = u < U
    inside = known[:, None] & (n < D)[None, :]
    x_at = rows_ptr + u[:, None] * stride * X + n[None, :]
    x = _bfloat16(tl.load(x_at, mask=inside, other=0.0).to(tl.float32))
    scale = _carried(_largest(x, 1)) & -8388608
    codes = _codes(tl.div_rn(x, scale.to(tl.float32, bitcast=True)[:, None]))
    at, kept = _place(
        u, known, sequence_ptr, number_ptr, total_ptr, table_ptr, table_row, page, row, start,
        PER_PAGE, RING, LANE, PAGED,
    )  # fmt: skip
    to = out_ptr + at
    inside = kept[:, None] & (n < D)[None, :]
    if BYTES:
        tl.store(to[:, None] + n[None, :], codes.to(tl.uint8), mask=inside)
        for b in tl.static_range(4):
            tl.store(to + D + b, ((scale >> (8 * b)) & 0xFF).to(tl.uint8), mask=kept)
    else:
        values = _values(codes) * scale.to(tl.float32, bitcast=True)[:, None]
        values = values.to(out_ptr.dtype.element_ty)
        tl.store(to[:, None] + n[None, :], values, mask=inside)


@triton.jit(do_not_specialize=["U", "table_row"])
def _latent(
    rows_ptr, out_ptr, sequence_ptr, number_ptr, total_ptr, table_ptr,
    U, stride, table_row, page, row, start,
    NOPE: tl.constexpr, ROPE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
    TAIL: tl.constexpr, X: tl.constexpr,
    PER_PAGE: tl.constexpr, RING: tl.constexpr, LANE: tl.constexpr, PAGED: tl.constexpr,
    BYTES: tl.constexpr,
):  # fmt: skip
    """LatentFP8, one row: NOPE codes, ROPE bfloat16, a scale byte a GROUP, a zero. GROUPS, TAIL: filled to powers of
    two. Not BYTES: what a reader gets back."""
    u = tl.program_id(0).to(tl.int64)
    at, kept = _place(
        u, u < U, sequence_ptr, number_ptr, total_ptr, table_ptr, table_row, page, row, start,
        PER_PAGE, RING, LANE, PAGED,
    )  # fmt: skip
    if kept:
        x_ptr, to = rows_ptr + u * stride * X, out_ptr + at
        g = tl.arange(0, GROUPS)
        n = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        x = _bfloat16(tl.load(x_ptr + n, mask=n < NOPE, other=0.0).to(tl.float32))
        byte = tl.minimum(tl.maximum(_carried(_largest(x, 1)) >> 23, 1), 254)
        scale = (byte << 23).to(tl.float32, bitcast=True)
        codes = _codes(tl.div_rn(x, scale[:, None]))
        b = tl.arange(0, TAIL)
        if BYTES:
            tl.store(to + n, codes.to(tl.uint8), mask=n < NOPE)
            last = tl.load(x_ptr + NOPE + b // 2, mask=b < 2 * ROPE, other=0.0).to(tl.float32)
            last = _bfloat16(last).to(tl.int32, bitcast=True) >> (16 + 8 * (b % 2))
            tl.store(to + NOPE + b, (last & 0xFF).to(tl.uint8), mask=b < 2 * ROPE)
            byte = tl.where(g < NOPE // GROUP, byte, 0)
            tl.store(to + NOPE + 2 * ROPE + g, byte.to(tl.uint8), mask=g <= NOPE // GROUP)
        else:
            kind = out_ptr.dtype.element_ty
            tl.store(to + n, _bfloat16(_values(codes) * scale[:, None]).to(kind), mask=n < NOPE)
            last = tl.load(x_ptr + NOPE + b, mask=b < ROPE, other=0.0).to(tl.float32)
            tl.store(to + NOPE + b, _bfloat16(last).to(kind), mask=b < ROPE)


def encode(rows: Tensor, record: LatentFP8 | VectorFP8) -> Tensor:
    """uint8 [..., size]: the bytes of `record.encode` of rows [..., D], bfloat16 or float32."""
    *shape, D = rows.shape
    out = torch.empty(*shape, record.size(D), dtype=torch.uint8, device=rows.device)
    flat = out.view(-1, out.shape[-1])
    _launch(rows.reshape(-1, D), record, Pages(flat, flat, 1, 0, flat.shape[1]), True)
    return out


def round_trip(
    rows: Tensor, record: LatentFP8 | VectorFP8, dtype: torch.dtype | None = None
) -> Tensor:
    """[..., D]: what a reader of the record gets back for rows [..., D], without a gradient. dtype: bfloat16 or
    float32, which both hold it exactly; else that of the record (a latent's is bfloat16, a vector's float32)."""
    if dtype is None:
        dtype = torch.bfloat16 if isinstance(record, LatentFP8) else torch.float32
    out = torch.empty(rows.shape, dtype=dtype, device=rows.device)
    flat = out.view(-1, out.shape[-1])
    _launch(rows.reshape(-1, rows.shape[-1]), record, Pages(flat, flat, 1, 0, flat.shape[1]), False)
    return out


def write_records(
    pages: Pages,
    rows_UD: Tensor,
    record: Record,
    sequence_U: Tensor,
    number_U: Tensor,
    total_S: Tensor,
) -> None:
    """Keep row u as row number_U[u] of sequence sequence_U[u], as its record's bytes (pages of uint8; a `PlainRecord`:
    pages of its dtype). Sequence -1: nothing is kept.

    rows: bfloat16 or float32, which may lie apart. total_S: no sequence has more rows than that now; only a ring that
    keeps less than its page asks, for which it is their number. All int32.
    """
    if isinstance(record, PlainRecord):
        write(Sequences(sequence_U, number_U, total_S, total_S, total_S), (pages,), (rows_UD,))
        return
    assert isinstance(record, LatentFP8 | VectorFP8), f"no kernel writes {record.name}"
    _launch(rows_UD, record, pages, True, (sequence_U, number_U, total_S))


def lane_of(pages: Pages) -> int:
    """Elements that every row begins at a multiple of: a power of two, at most 16 bytes."""
    places = (pages.page, pages.row, pages.start, pages.values.data_ptr(), 16)
    size = pages.values.element_size()
    sizes = (*(place * size for place in places[:3]), *places[3:])
    return max(min(place & -place for place in sizes if place) // size, 1)


def _launch(
    rows: Tensor,
    record: LatentFP8 | VectorFP8,
    pages: Pages,
    as_bytes: bool,
    places: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """places: sequence_U, number_U, total_S; without them row u goes to row u of the values."""
    U, D = rows.shape
    if not rows.numel():
        return
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    stride, x_lane = row_lanes(rows)
    lane = lane_of(pages)
    args = (
        rows, pages.values, *(places or (pages.values,) * 3), pages.table_SK,
        U, stride, pages.table_SK.stride(0), pages.page // lane, pages.row // lane,
        pages.start // lane,
    )  # fmt: skip
    kept = (x_lane, pages.per_page, pages.ring, lane, places is not None, as_bytes)
    if isinstance(record, VectorFP8):
        block = max(triton.next_power_of_2(D), 16)
        _vector[(triton.cdiv(U, ROWS),)](*args, D, block, ROWS, *kept, num_warps=2)
        return
    record.size(D)  # asks for whole groups
    nope = D - record.rope
    groups = triton.next_power_of_2(nope // record.block + 1)
    tail = max(triton.next_power_of_2(2 * record.rope), 16)
    _latent[(U,)](*args, nope, record.rope, record.block, groups, tail, *kept, num_warps=1)
