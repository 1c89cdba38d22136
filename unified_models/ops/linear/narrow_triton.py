"""x @ w.T on tensor cores, for operands whose values bfloat16 holds exactly; sums in float32, each row by itself.

A tile's shape follows the number of rows, since its rows' bits do not: an element is summed over K in the same steps of
the same instruction whatever the tile. tests/gpu compares them.
"""

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

GROUP = 128
"""Channels that share a scale."""
LANE = 16
"""Rows of both operands are whole multiples of so many elements, at such addresses: every load is a full one."""
TILES = (
    (16, (16, 32, 256, 4, 4)),
    (64, (64, 64, 64, 4, 5)),
    (128, (64, 128, 64, 4, 4)),
    (512, (128, 128, 64, 8, 4)),
    (None, (128, 256, 64, 8, 3)),
)
"""Up to so many rows: rows, columns and depth of a tile, warps, stages. Measured on an H200."""
FEW = 512
"""Columns, for which tiles of 16 rows do up to twice as many rows."""
FEWER, PROGRAMS = (16, 16, 256, 4, 6), 100
"""A tile for fewer columns, where the one of 16 rows would make so few programs that processors idle: each walks all of
K. The steps of the instruction over K are the same."""
E4M3_TILES = ((1024, (64, 64, 128, 4, 3)), (None, (64, 128, 128, 4, 3)))
"""The same for weights of bytes. Never 16 rows: that instruction would take them in another order than the others."""
READ = tl.float32 if os.environ.get("TRITON_INTERPRET") == "1" else tl.bfloat16
"""What operands are multiplied as. Triton's interpreter multiplies bfloat16 as if it were whole numbers."""


@triton.jit(do_not_specialize=["T", "N"])
def _product(
    x_ptr, w_ptr, out_ptr, T, N, K, stride_x, stride_w,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """out[t, n] = sum_k x[t, k] w[n, k], k ascending."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + t.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * stride_w + k[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        inside = k < K - start
        x = tl.load(x_at + start, mask=(t[:, None] < T) & inside[None, :], other=0.0)
        w = tl.load(w_at + start, mask=(n[None, :] < N) & inside[:, None], other=0.0)
        total = tl.dot(x.to(READ), w.to(READ), total, input_precision="ieee")
    at = t.to(tl.int64)[:, None] * N + n[None, :]
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=(t[:, None] < T) & (n[None, :] < N))


@triton.jit(do_not_specialize=["T", "N"])
def _scaled_product(
    x_ptr, xs_ptr, w_ptr, ws_ptr, out_ptr, T, N, K, stride_x, stride_w, BLOCKS,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    """out[t, n] = sum_b (sum_k in b x[t, k] w[n, k]) * (xs[t, b] ws[n, b]), blocks of DEPTH ascending; K is whole
    blocks. xs [T, BLOCKS], ws [N, BLOCKS]."""
    t = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, DEPTH)
    x_at = x_ptr + t.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = w_ptr + n.to(tl.int64)[None, :] * stride_w + k[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for b in range(BLOCKS):
        x = tl.load(x_at + b * DEPTH, mask=t[:, None] < T, other=0.0)
        w = tl.load(w_at + b * DEPTH, mask=n[None, :] < N, other=0.0)
        xs = tl.load(xs_ptr + t.to(tl.int64) * BLOCKS + b, mask=t < T, other=0.0)
        ws = tl.load(ws_ptr + n.to(tl.int64) * BLOCKS + b, mask=n < N, other=0.0)
        part = tl.dot(x.to(READ), w.to(READ), input_precision="ieee")
        total += part * (xs[:, None] * ws[None, :])
    at = t.to(tl.int64)[:, None] * N + n[None, :]
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=(t[:, None] < T) & (n[None, :] < N))


def product(
    x_TK: Tensor,
    w_NK: Tensor,
    dtype: torch.dtype = torch.float32,
    tile: tuple[int, ...] | None = None,
) -> Tensor:
    """x @ w.T, [T, N]: float32 sums, rounded once to `dtype`. x: bfloat16; w: bfloat16 or e4m3. tile: another than the
    chosen one, for tests."""
    T, N = len(x_TK), len(w_NK)
    out = torch.empty(T, N, dtype=dtype, device=x_TK.device)
    if out.numel() == 0:
        return out
    x_TK, w_NK = lanes(x_TK), lanes(w_NK)
    rows, columns, depth, warps, stages = tile or tile_of(T, w_NK.dtype, N)
    grid = (triton.cdiv(T, rows), triton.cdiv(N, columns))  # neighbours read the same columns
    _product[grid](
        x_TK, w_NK, out, T, N, x_TK.shape[1], x_TK.stride(0), w_NK.stride(0),
        rows, columns, depth, READ, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def scaled_product(
    x_TK: Tensor,
    xs_TB: Tensor,
    w_NK: Tensor,
    ws_NB: Tensor,
    dtype: torch.dtype = torch.float32,
    tile: tuple[int, ...] | None = None,
) -> Tensor:
    """Codes times codes of each 128-block, times both scales, added block by block; [T, N], rounded once to `dtype`.

    x: bfloat16 codes [T, B * 128]; w: e4m3 codes [N, B * 128]; scales float32.
    """
    (T, _), (N, B) = x_TK.shape, ws_NB.shape
    out = torch.empty(T, N, dtype=dtype, device=x_TK.device)
    if out.numel() == 0:
        return out
    x_TK, w_NK = lanes(x_TK), lanes(w_NK)
    rows, columns, _, warps, stages = tile or tile_of(T, torch.float8_e4m3fn)
    grid = (triton.cdiv(T, rows), triton.cdiv(N, columns))
    _scaled_product[grid](
        x_TK, xs_TB.contiguous(), w_NK, ws_NB.contiguous(), out, T, N, B * GROUP,
        x_TK.stride(0), w_NK.stride(0), B,
        rows, columns, GROUP, READ, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def tile_of(rows: int, dtype: torch.dtype, columns: int = 1 << 30) -> tuple[int, ...]:
    """Of a product of so many rows with a weight of that dtype and so many columns: with few, larger tiles would leave
    most of the GPU idle."""
    tiles = TILES if dtype == torch.bfloat16 else E4M3_TILES
    if dtype == torch.bfloat16 and columns <= FEW and rows <= 2 * FEW:
        few = triton.cdiv(rows, TILES[0][1][0]) * triton.cdiv(columns, TILES[0][1][1])
        return FEWER if few < PROGRAMS else TILES[0][1]
    return next(tile for most, tile in tiles if most is None or rows <= most)


def lanes(matrix: Tensor) -> Tensor:
    """The same values, rows zero-filled to whole lanes at whole addresses; a copy only where they are not."""
    missing = -matrix.shape[1] % LANE
    if missing:
        out = matrix.new_zeros(len(matrix), matrix.shape[1] + missing)
        out[:, : matrix.shape[1]] = matrix
        return out
    if matrix.stride(1) != 1 or matrix.stride(0) % LANE or matrix.data_ptr() % LANE:
        return matrix.contiguous().clone() if matrix.is_contiguous() else matrix.contiguous()
    return matrix
