"""Rows of all experts times their experts' matrices, in one launch that no host waits for.

A row has the bits that `linear/narrow_triton.py`, or `products_triton.py` in float32, gives it with its expert's matrix
alone: the same steps over K, in the same order, in the same instruction.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.narrow_triton import GROUP, READ, lanes

TILES = (
    (24, (16, 128, 128, 4, 3)),
    (96, (64, 128, 64, 4, 4)),
    (None, (128, 128, 64, 8, 4)),
)
"""Up to so many rows an expert, on average: rows, columns and depth of a tile, warps, stages."""
E4M3_TILES = ((16, (16, 64, 128, 4, 4)), (None, (64, 128, 128, 4, 3)))
"""The same for weights of bytes. A tile of fewer rows than `INSTRUCTION` is turned, w @ x.T, and has that many columns
at least: bytes keep their order in that instruction alone (H200), and in it they may come from registers."""
INSTRUCTION = 64
"""Rows of Hopper's matrix instruction."""
FLOAT_TILE = (16, 64, 32, 4, 2)
"""In float32, that of `products_triton`."""
MANY = 128
"""Rows of a tile from which on programs side by side share rows: many rows of few experts are then read at a time, and
each is read once. In the other order all rows are read for each column of tiles."""
MOST = 65536
"""Programs of a grid's second dimension."""
WIDTH = 128
"""Tiles of an expert that are written at a time."""


@triton.jit(do_not_specialize=["V"])
def _row_tiles(
    counts_ptr, tiles_ptr, E, V, ROWS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    """Program e: (e, first row, end of e's rows) of each tile of expert e; program E: expert -1, up to V tiles."""
    e = tl.program_id(0)
    each = tl.arange(0, BLOCK)
    counts = tl.load(counts_ptr + each, mask=each < E, other=0).to(tl.int32)
    tiles = (counts + ROWS - 1) // ROWS
    start = tl.sum(tl.where(each < e, counts, 0), axis=0)  # a count
    first = tl.sum(tl.where(each < e, tiles, 0), axis=0)  # a count
    end = start + tl.sum(tl.where(each == e, counts, 0), axis=0)  # a count
    own = tl.where(e < E, (end - start + ROWS - 1) // ROWS, V - first)
    for some in range(0, own, WIDTH):
        v = some + tl.arange(0, WIDTH)
        at = tiles_ptr + (first + v) * 3
        expert = tl.zeros((WIDTH,), dtype=tl.int32) + tl.where(e < E, e, -1)
        tl.store(at, expert, mask=v < own)
        tl.store(at + 1, start + v * ROWS, mask=v < own)
        tl.store(at + 2, tl.zeros((WIDTH,), dtype=tl.int32) + end, mask=v < own)


@triton.jit
def _sums(
    a_at, b_at, in_a, in_b, K,
    A: tl.constexpr, B: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """sum_k a[k] b[k], k ascending, of the A and B vectors that are there: as narrow_triton._product."""
    k = tl.arange(0, DEPTH)
    total = tl.zeros((A, B), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        inside = k < K - start
        a = tl.load(a_at + start, mask=in_a[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at + start, mask=in_b[None, :] & inside[:, None], other=0.0)
        total = tl.dot(a.to(READ), b.to(READ), total, input_precision="ieee")
    return total


@triton.jit
def _scaled_sums(
    a_at, b_at, in_a, in_b, xs_at, in_x, ws_at, BLOCKS,
    A: tl.constexpr, B: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """sum_c (sum_k in c a[k] b[k]) * (xs[c] ws[c]), blocks c of DEPTH ascending: as narrow_triton._scaled_product. ws
    is one number for the whole tile, xs one a row of x, which is b if TURNED."""
    total = tl.zeros((A, B), dtype=tl.float32)
    for c in range(BLOCKS):
        a = tl.load(a_at + c * DEPTH, mask=in_a[:, None], other=0.0)
        b = tl.load(b_at + c * DEPTH, mask=in_b[None, :], other=0.0)
        scale = tl.load(xs_at + c, mask=in_x, other=0.0) * tl.load(ws_at + c)
        part = tl.dot(a.to(READ), b.to(READ), input_precision="ieee")
        if TURNED:
            total += part * scale[None, :]
        else:
            total += part * scale[:, None]
    return total


@triton.jit(do_not_specialize=["N"])
def _grouped_product(
    x_ptr, xs_ptr, w_ptr, ws_ptr, outer_ptr, out_ptr, tiles_ptr, N, K, BLOCKS,
    stride_x, stride_e, stride_w,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    SCALED: tl.constexpr, OUTER: tl.constexpr, TURNED: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """out[t, n] = x[t] . w[e, n], times outer[e]. tiles [V, 3]: see _row_tiles. xs [P, BLOCKS]; ws [E, N / DEPTH,
    BLOCKS], N rounded up and COLUMNS a part of DEPTH. TURNED: the tile is computed as w @ x.T. BESIDE: neighbours have
    the same rows, and not the same columns."""
    tile = tiles_ptr + tl.program_id(1 if BESIDE else 0) * 3
    c = tl.program_id(0 if BESIDE else 1)
    e = tl.load(tile).to(tl.int64)
    if e < 0:
        return
    t = tl.load(tile + 1) + tl.arange(0, ROWS)
    row = t < tl.load(tile + 2)
    n = c * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    column, t, n = n < N, t.to(tl.int64), n.to(tl.int64)
    A: tl.constexpr = COLUMNS if TURNED else ROWS
    B: tl.constexpr = ROWS if TURNED else COLUMNS
    w_ptr += e * stride_e
    if TURNED:
        in_a, in_b = column, row
        a_at = w_ptr + n[:, None] * stride_w + k[None, :]
        b_at = x_ptr + t[None, :] * stride_x + k[:, None]
        at = out_ptr + t[None, :] * N + n[:, None]
    else:
        in_a, in_b = row, column
        a_at = x_ptr + t[:, None] * stride_x + k[None, :]
        b_at = w_ptr + n[None, :] * stride_w + k[:, None]
        at = out_ptr + t[:, None] * N + n[None, :]
    if SCALED:
        ws_at = ws_ptr + (e * tl.cdiv(N, DEPTH) + c * COLUMNS // DEPTH) * BLOCKS
        total = _scaled_sums(
            a_at, b_at, in_a, in_b, xs_ptr + t * BLOCKS, row, ws_at, BLOCKS,
            A, B, DEPTH, READ, TURNED,
        )  # fmt: skip
    else:
        total = _sums(a_at, b_at, in_a, in_b, K, A, B, DEPTH, READ)
    if OUTER:
        total = total * tl.load(outer_ptr + e)
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_a[:, None] & in_b[None, :])


class RowTiles:
    """The tiles of rows sorted by expert. Each height's are listed once, for all weights of a call.

    counts_E: rows of each expert, int32 or int64 on the device; P: their sum.
    """

    def __init__(self, counts_E: Tensor, P: int) -> None:
        self.counts_E, self.P = counts_E.contiguous(), P
        self.made: dict[int, Tensor] = {}
        self._ends_E: Tensor | None = None

    @property
    def ends_E(self) -> Tensor:
        """The end of each expert's rows, int64. Of the backward alone."""
        if self._ends_E is None:
            self._ends_E = self.counts_E.cumsum(0)
        return self._ends_E

    def of(self, rows: int) -> Tensor:
        """int32 [V, 3]: expert, first row, and the end of the expert's rows; expert -1 where there is no tile. V
        follows from P and E alone, and tiles of one expert stand side by side."""
        if rows not in self.made:
            E = len(self.counts_E)
            V = self.P // rows + min(E, self.P)
            tiles_V3 = torch.empty(V, 3, dtype=torch.int32, device=self.counts_E.device)
            _row_tiles[(E + 1,)](
                self.counts_E, tiles_V3, E, V,
                rows, max(triton.next_power_of_2(E), 32), WIDTH, num_warps=1,
            )  # fmt: skip
            self.made[rows] = tiles_V3
        return self.made[rows]


def grouped_product(
    x_PK: Tensor,
    w_ENK: Tensor,
    tiles: RowTiles,
    *,
    xs_PB: Tensor | None = None,
    ws_ECB: Tensor | None = None,
    outer_E: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tile: tuple[int, ...] | None = None,
) -> Tensor:
    """Rows sorted by expert times their expert's matrix, float32 sums, rounded to `dtype`: [P, N].

    x: bfloat16 with w of bfloat16 or e4m3 [E, N, K], or float16 with e4m3; in float32 where either is that. xs, ws:
    scales of e4m3 codes, float32, of each 128 of K [P, B] and of each block of 128 x 128 [E, C, B]. outer: multiplies
    an expert's sums, float32. tile: another than the chosen one, for tests.
    """
    P, (E, N, _) = len(x_PK), w_ENK.shape
    out = torch.empty(P, N, dtype=dtype, device=x_PK.device)
    if out.numel() == 0:
        return out
    narrow = torch.float32 not in (x_PK.dtype, w_ENK.dtype)
    read = READ if x_PK.dtype == torch.bfloat16 or READ is tl.float32 else tl.float16
    x = lanes(x_PK)
    w = lanes(w_ENK.flatten(0, 1)).unflatten(0, (E, N))
    scaled = xs_PB is not None and ws_ECB is not None
    xs, ws = (xs_PB.contiguous(), ws_ECB.contiguous()) if scaled else (x, w)  # type: ignore[union-attr]
    rows, columns, depth, warps, stages = tile or tile_of(P, E, w.dtype, narrow)
    assert not scaled or GROUP % columns == 0, f"{columns} columns of more than one block"
    turned = w.dtype == torch.float8_e4m3fn and rows < INSTRUCTION
    tiles_V3 = tiles.of(rows)
    grid = len(tiles_V3), triton.cdiv(N, columns)
    beside = rows >= MANY and grid[0] < MOST
    _grouped_product[grid[::-1] if beside else grid](
        x, xs, w, ws, w if outer_E is None else outer_E.contiguous(), out, tiles_V3,
        N, x.shape[1], xs.shape[1] if scaled else 0,
        x.stride(0), w.stride(0), w.stride(1),
        rows, columns, GROUP if scaled else depth, read if narrow else tl.float32,
        scaled, outer_E is not None, turned, beside, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def tile_of(P: int, E: int, dtype: torch.dtype, narrow: bool) -> tuple[int, ...]:
    """Of P rows of E experts in all, and weights of that dtype: known without asking the GPU."""
    if not narrow:
        return FLOAT_TILE
    tiles = TILES if dtype == torch.bfloat16 else E4M3_TILES
    return next(tile for most, tile in tiles if most is None or most * E >= P)
