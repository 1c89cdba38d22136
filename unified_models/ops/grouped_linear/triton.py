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
E4M3_TILES = ((96, (64, 64, 128, 4, 3)), (None, (64, 128, 128, 4, 3)))
"""The same for weights of bytes. Never 16 or 32 rows: those instructions take them in another order (H200)."""
FLOAT_TILE = (16, 64, 32, 4, 2)
"""In float32, that of `products_triton`."""
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
    x_at, w_at, row, column, K,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """sum_k x[k] w[k], k ascending, of rows and columns that are there: as narrow_triton._product."""
    k = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        inside = k < K - start
        x = tl.load(x_at + start, mask=row[:, None] & inside[None, :], other=0.0)
        w = tl.load(w_at + start, mask=column[None, :] & inside[:, None], other=0.0)
        total = tl.dot(x.to(READ), w.to(READ), total, input_precision="ieee")
    return total


@triton.jit
def _scaled_sums(
    x_at, xs_at, w_at, ws_at, row, column, BLOCKS,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """sum_b (sum_k in b x[k] w[k]) * (xs[b] ws[b]), blocks of DEPTH ascending: as narrow_triton._scaled_product."""
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for b in range(BLOCKS):
        x = tl.load(x_at + b * DEPTH, mask=row[:, None], other=0.0)
        w = tl.load(w_at + b * DEPTH, mask=column[None, :], other=0.0)
        xs = tl.load(xs_at + b, mask=row, other=0.0)
        ws = tl.load(ws_at + b, mask=column, other=0.0)
        part = tl.dot(x.to(READ), w.to(READ), input_precision="ieee")
        total += part * (xs[:, None] * ws[None, :])
    return total


@triton.jit(do_not_specialize=["N"])
def _grouped_product(
    x_ptr, xs_ptr, w_ptr, ws_ptr, outer_ptr, out_ptr, tiles_ptr, N, K, BLOCKS,
    stride_x, stride_e, stride_w,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    SCALED: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """out[t, n] = x[t] . w[e, n], times outer[e]. tiles [V, 3]: see _row_tiles. xs [P, BLOCKS], ws [E, N, BLOCKS]."""
    tile = tiles_ptr + tl.program_id(0) * 3
    e = tl.load(tile).to(tl.int64)
    if e < 0:
        return
    t = tl.load(tile + 1) + tl.arange(0, ROWS)
    row = t < tl.load(tile + 2)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    column, t, n = n < N, t.to(tl.int64), n.to(tl.int64)
    x_at = x_ptr + t[:, None] * stride_x + k[None, :]
    w_at = w_ptr + e * stride_e + n[None, :] * stride_w + k[:, None]
    if SCALED:
        xs_at, ws_at = xs_ptr + t * BLOCKS, ws_ptr + (e * N + n) * BLOCKS
        total = _scaled_sums(
            x_at, xs_at, w_at, ws_at, row, column, BLOCKS, ROWS, COLUMNS, DEPTH, READ
        )
    else:
        total = _sums(x_at, w_at, row, column, K, ROWS, COLUMNS, DEPTH, READ)
    if OUTER:
        total = total * tl.load(outer_ptr + e)
    at = out_ptr + t[:, None] * N + n[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=row[:, None] & column[None, :])


class RowTiles:
    """The tiles of rows sorted by expert. Each height's are listed once, for all weights of a call.

    counts_E: rows of each expert, int32 or int64 on the device; P: their sum.
    """

    def __init__(self, counts_E: Tensor, P: int) -> None:
        self.counts_E, self.P = counts_E.contiguous(), P
        self.made: dict[int, Tensor] = {}

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
    ws_ENB: Tensor | None = None,
    outer_E: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    tile: tuple[int, ...] | None = None,
) -> Tensor:
    """Rows sorted by expert times their expert's matrix, float32 sums, rounded to `dtype`: [P, N].

    x: bfloat16 with w of bfloat16 or e4m3 [E, N, K]; in float32 where either is that. xs, ws: scales of each 128 of K,
    float32, of e4m3 codes. outer: multiplies an expert's sums, float32. tile: another than the chosen one, for tests.
    """
    P, (E, N, _) = len(x_PK), w_ENK.shape
    out = torch.empty(P, N, dtype=dtype, device=x_PK.device)
    if out.numel() == 0:
        return out
    narrow = x_PK.dtype == torch.bfloat16 and w_ENK.dtype != torch.float32
    x = lanes(x_PK)
    w = lanes(w_ENK.flatten(0, 1)).unflatten(0, (E, N))
    scaled = xs_PB is not None and ws_ENB is not None
    xs, ws = (xs_PB.contiguous(), ws_ENB.contiguous()) if scaled else (x, w)  # type: ignore[union-attr]
    rows, columns, depth, warps, stages = tile or tile_of(P, E, w.dtype, narrow)
    tiles_V3 = tiles.of(rows)
    _grouped_product[(len(tiles_V3), triton.cdiv(N, columns))](
        x, xs, w, ws, w if outer_E is None else outer_E.contiguous(), out, tiles_V3,
        N, x.shape[1], xs.shape[1] if scaled else 0,
        x.stride(0), w.stride(0), w.stride(1),
        rows, columns, GROUP if scaled else depth, READ if narrow else tl.float32,
        scaled, outer_E is not None, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def tile_of(P: int, E: int, dtype: torch.dtype, narrow: bool) -> tuple[int, ...]:
    """Of P rows of E experts in all, and weights of that dtype: known without asking the GPU."""
    if not narrow:
        return FLOAT_TILE
    tiles = TILES if dtype == torch.bfloat16 else E4M3_TILES
    return next(tile for most, tile in tiles if most is None or most * E >= P)
