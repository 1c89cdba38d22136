"""The products of a linear's backward on tensor cores: dX = dY w and dW = dY^T x, with float32 sums over ascending rows
or columns.

Operands are bfloat16, or bytes, which bfloat16 holds. One float32 operand is read as three bfloat16 numbers whose sum
it is (8 + 8 + 8 significant bits): three products with the other, exact as one in float32. Infinities become NaN so.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.narrow_triton import GROUP, READ
from unified_models.ops.linear.split_triton import add_parts
from unified_models.ops.rows import lane_of

TILES = ((64, (64, 64, 64, 4, 4)), (None, (128, 128, 64, 8, 3)))
"""Up to so many rows of the result: rows, columns and depth of a tile, warps, stages."""
WIDE_TILE, WIDE_BLOCKS = (128, 64, 64, 8, 3), (64, 64, 128, 4, 3)
"""The same where one operand is three, and where the other has blocks of its own besides."""
BUSY = 264
"""Programs that an H200 runs at once: a product of fewer tiles is cut along its sum."""
SHORT = 1024
"""Terms that a part of a sum has at least."""
TURN = 16
"""Rows of tiles whose programs stand side by side: they read the same columns while a GPU's L2 holds them."""


@triton.jit
def pieces(x):
    """Three bfloat16 numbers whose sum is x, float32; the largest first."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    return high, middle, low


@triton.jit
def multiplied(a, b, total, READ: tl.constexpr, SPLIT_A: tl.constexpr, SPLIT_B: tl.constexpr):
    """total + a @ b; one that is SPLIT in its three pieces, the smallest first."""
    if SPLIT_A:
        high, middle, low = pieces(a)
        b = b.to(READ)
        total = tl.dot(low.to(READ), b, total, input_precision="ieee")
        total = tl.dot(middle.to(READ), b, total, input_precision="ieee")
        total = tl.dot(high.to(READ), b, total, input_precision="ieee")
    elif SPLIT_B:
        high, middle, low = pieces(b)
        a = a.to(READ)
        total = tl.dot(a, low.to(READ), total, input_precision="ieee")
        total = tl.dot(a, middle.to(READ), total, input_precision="ieee")
        total = tl.dot(a, high.to(READ), total, input_precision="ieee")
    else:
        total = tl.dot(a.to(READ), b.to(READ), total, input_precision="ieee")
    return total


@triton.jit
def sums(
    a_at, b_at, step_a, step_b, in_a, in_b, size, left,
    A: tl.constexpr, B: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    SPLIT_A: tl.constexpr, SPLIT_B: tl.constexpr,
):  # fmt: skip
    """sum_k a[k] b[k] of the k below size and left, ascending; a vector's next element is a step away."""
    k = tl.arange(0, DEPTH)
    total = tl.zeros((A, B), dtype=tl.float32)
    for start in range(0, size, DEPTH):
        inside = k < left - start
        a = tl.load(a_at, mask=in_a[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at, mask=in_b[None, :] & inside[:, None], other=0.0)
        total = multiplied(a, b, total, READ, SPLIT_A, SPLIT_B)
        a_at += DEPTH * step_a
        b_at += DEPTH * step_b
    return total


@triton.jit
def scaled_sums(
    a_at, b_at, step_a, step_b, in_a, in_b, size, scales_at, BLOCKS,
    A: tl.constexpr, B: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    SPLIT_A: tl.constexpr,
):  # fmt: skip
    """sum_c (sum_k in c a[k] b[k]) scales[c], blocks c of DEPTH ascending; the next scale is BLOCKS away."""
    k = tl.arange(0, DEPTH)
    total = tl.zeros((A, B), dtype=tl.float32)
    for start in range(0, size, DEPTH):
        inside = k < size - start
        a = tl.load(a_at, mask=in_a[:, None] & inside[None, :], other=0.0)
        b = tl.load(b_at, mask=in_b[None, :] & inside[:, None], other=0.0)
        none = tl.zeros((A, B), dtype=tl.float32)
        total += multiplied(a, b, none, READ, SPLIT_A, False) * tl.load(scales_at)
        a_at += DEPTH * step_a
        b_at += DEPTH * step_b
        scales_at += BLOCKS
    return total


@triton.jit(do_not_specialize=["M", "N", "K", "steps"])
def _product(
    a_ptr, b_ptr, scales_ptr, outer_ptr, out_ptr, M, N, K, steps, BLOCKS,
    stride_am, stride_ak, stride_bk, stride_bn, stride_out,
    M_LANE: tl.constexpr, N_LANE: tl.constexpr, K_LANE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    SPLIT_A: tl.constexpr, SPLIT_B: tl.constexpr, SCALED: tl.constexpr, OUTER: tl.constexpr,
    TURN: tl.constexpr,
):  # fmt: skip
    """out[p, m, n] = sum_{k in part p} a[m, k] b[k, n], k ascending, times outer. Sizes come in lanes; a part has
    `steps` times DEPTH terms. SCALED: blocks of DEPTH terms by the columns of COLUMNS or more have a scale each."""
    M, N, K = M * M_LANE, N * N_LANE, K * K_LANE
    high, wide = tl.cdiv(M, ROWS), tl.cdiv(N, COLUMNS)
    turn = tl.program_id(0) // (TURN * wide)
    place = tl.program_id(0) % (TURN * wide)
    some = tl.minimum(high - turn * TURN, TURN)
    row, column = turn * TURN + place % some, place // some
    part = tl.program_id(1)
    m, n = row * ROWS + tl.arange(0, ROWS), column * COLUMNS + tl.arange(0, COLUMNS)
    k = part * (steps * DEPTH) + tl.arange(0, DEPTH)
    in_m, in_n = m < M, n < N
    m, n, k = m.to(tl.int64), n.to(tl.int64), k.to(tl.int64)
    a_at = a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak
    b_at = b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn
    if SCALED:
        scales_at = scales_ptr + column * COLUMNS // DEPTH
        total = scaled_sums(
            a_at, b_at, stride_ak, stride_bk, in_m, in_n, K, scales_at, BLOCKS,
            ROWS, COLUMNS, DEPTH, READ, SPLIT_A,
        )  # fmt: skip
    else:
        total = sums(
            a_at, b_at, stride_ak, stride_bk, in_m, in_n, steps * DEPTH,
            K - part * (steps * DEPTH), ROWS, COLUMNS, DEPTH, READ, SPLIT_A, SPLIT_B,
        )  # fmt: skip
    if OUTER:
        total = total * tl.load(outer_ptr)
    at = part.to(tl.int64) * M * N + m[:, None] * stride_out + n[None, :]
    total = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=in_m[:, None] & in_n[None, :])


def split(a: Tensor, b: Tensor) -> tuple[bool, bool]:
    """Which of two operands is three. AssertionError: both would be."""
    both = a.dtype == torch.float32, b.dtype == torch.float32
    assert not all(both), "a product of two float32 operands"
    return both


def tile_of(rows: float, wide: bool, scaled: bool = False) -> tuple[int, ...]:
    """Of a result of so many rows; wide: one operand is three; scaled: the other has blocks."""
    if wide:
        return WIDE_BLOCKS if scaled else WIDE_TILE
    return next(tile for most, tile in TILES if most is None or rows <= most)


def parts_of(M: int, N: int, K: int, tile: tuple[int, ...]) -> int:
    """In how many parts a sum of K terms goes, for M x N of them: that follows from the shapes."""
    tiles = triton.cdiv(M, tile[0]) * triton.cdiv(N, tile[1])
    return max(min(BUSY // max(int(tiles), 1), K // SHORT), 1)


def dgrad(
    dy_TN: Tensor,
    w_NK: Tensor,
    out_TK: Tensor,
    scales_CB: Tensor | None = None,
    outer: Tensor | None = None,
    tile: tuple[int, ...] | None = None,
) -> None:
    """out = dy @ w, n ascending, rounded once to out's dtype; out's rows may lie apart.

    dy: bfloat16 or float32, rows any stride apart; w: bfloat16, e4m3 or float32, wider than out where it is padded;
    scales: of blocks of 128 x 128 of w, float32. outer: float32 [], multiplies a sum.
    """
    T, K = out_TK.shape
    if out_TK.numel() == 0:
        return
    wide = split(dy_TN, w_NK)
    scaled = scales_CB is not None
    rows, columns, depth, warps, stages = tile or tile_of(T, any(wide), scaled)
    launch(
        dy_TN, w_NK, out_TK, (T, K, len(w_NK)), (1, lane_of(K), lane_of(len(w_NK))),
        (dy_TN.stride(0), dy_TN.stride(1), w_NK.stride(0), w_NK.stride(1), out_TK.stride(0)),
        (rows, columns, GROUP if scaled else depth, warps, stages), 1,
        scales_CB, outer,
    )  # fmt: skip


def wgrad(
    dy_TN: Tensor,
    x_TK: Tensor,
    dtype: torch.dtype,
    outer: Tensor | None = None,
    tile: tuple[int, ...] | None = None,
    parts: int | None = None,
) -> Tensor:
    """dy.T @ x, [N, K], t ascending, rounded once to `dtype`; few tiles go in parts of T, added from the first on.

    dy, x: bfloat16, or one of them float32, rows any stride apart. outer: float32 [], multiplies a sum. tile, parts:
    others than the chosen ones, for tests.
    """
    (T, N), K = dy_TN.shape, x_TK.shape[1]
    if T == 0 or N * K == 0:
        return dy_TN.new_zeros(N, K, dtype=dtype)
    tile = tile or tile_of(N, any(split(dy_TN, x_TK)))
    parts = parts or parts_of(N, K, T, tile)
    out = torch.empty(N, K, dtype=dtype, device=x_TK.device)
    made = out if parts == 1 else torch.empty(parts, N, K, device=x_TK.device)
    launch(
        dy_TN, x_TK, made, (N, K, T), (lane_of(N), lane_of(K), 1),
        (dy_TN.stride(1), dy_TN.stride(0), x_TK.stride(0), x_TK.stride(1), K),
        tile, parts, None, outer,
    )  # fmt: skip
    if parts > 1:
        add_parts(made, out, parts)
    return out


def launch(
    a: Tensor, b: Tensor, out: Tensor, sizes: tuple[int, int, int], lanes: tuple[int, int, int],
    strides: tuple[int, ...], tile: tuple[int, ...], parts: int,
    scales: Tensor | None, outer: Tensor | None,
) -> None:  # fmt: skip
    """out[p] = a @ b over part p of K, for sizes M, N, K."""
    (M, N, K), (rows, columns, depth, warps, stages) = sizes, tile
    assert scales is None or GROUP % columns == 0, f"{columns} columns of more than one block"
    steps = triton.cdiv(triton.cdiv(K, depth), parts)
    grid = (triton.cdiv(M, rows) * triton.cdiv(N, columns), parts)
    scales = None if scales is None else scales.contiguous()
    _product[grid](
        a, b, b if scales is None else scales, b if outer is None else outer, out,
        *(size // lane for size, lane in zip(sizes, lanes, strict=True)),
        steps, 0 if scales is None else scales.stride(0), *strides, *lanes,
        rows, columns, depth, READ, *split(a, b), scales is not None, outer is not None, TURN,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
