"""The gradients of rows and of matrices of all experts, each in one launch that no host waits for.

The products are those of `linear/backward_triton.py`: float32 sums of bfloat16 products on tensor cores; of two float32
operands, fused multiply-adds. dX[p] sums over ascending n, dW[e] over the expert's rows in their order.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.grouped_linear.triton import FLOAT_TILE, RowTiles
from unified_models.ops.linear.backward_triton import (
    scaled_sums,
    sums,
)
from unified_models.ops.linear.backward_triton import tile_of as linear_tile
from unified_models.ops.linear.narrow_triton import GROUP, READ


@triton.jit
def _dgrad(
    dy_ptr, w_ptr, scales_ptr, outer_ptr, out_ptr, tiles_ptr, N, K, BLOCKS,
    stride_dy, stride_e, stride_w,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    SPLIT_DY: tl.constexpr, SPLIT_W: tl.constexpr, SCALED: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """out[t, k] = sum_n dy[t, n] w[e, n, k], n ascending, times outer[e]. tiles [V, 3]: see `RowTiles`. Neighbours have
    the same rows: few experts' matrices are read at a time."""
    wide = tl.cdiv(K, COLUMNS)
    tile = tiles_ptr + tl.program_id(0) // wide * 3
    column = tl.program_id(0) % wide
    e = tl.load(tile).to(tl.int64)
    if e < 0:
        return
    t = tl.load(tile + 1) + tl.arange(0, ROWS)
    k = column * COLUMNS + tl.arange(0, COLUMNS)
    n = tl.arange(0, DEPTH)
    in_t, in_k = t < tl.load(tile + 2), k < K
    t, k = t.to(tl.int64), k.to(tl.int64)
    a_at = dy_ptr + t[:, None] * stride_dy + n[None, :]
    b_at = w_ptr + e * stride_e + n.to(tl.int64)[:, None] * stride_w + k[None, :]
    if SCALED:
        scales_at = scales_ptr + e * tl.cdiv(N, DEPTH) * BLOCKS + column * COLUMNS // DEPTH
        total = scaled_sums(
            a_at, b_at, 1, stride_w, in_t, in_k, N, scales_at, BLOCKS,
            ROWS, COLUMNS, DEPTH, READ, SPLIT_DY,
        )  # fmt: skip
    else:
        total = sums(
            a_at, b_at, 1, stride_w, in_t, in_k, N, N,
            ROWS, COLUMNS, DEPTH, READ, SPLIT_DY, SPLIT_W,
        )  # fmt: skip
    if OUTER:
        total = total * tl.load(outer_ptr + e)
    at = out_ptr + t[:, None] * K + k[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_t[:, None] & in_k[None, :])


@triton.jit
def _wgrad(
    dy_ptr, x_ptr, outer_ptr, out_ptr, counts_ptr, ends_ptr, N, K, stride_dy, stride_x,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, READ: tl.constexpr,
    SPLIT_DY: tl.constexpr, SPLIT_X: tl.constexpr, OUTER: tl.constexpr,
):  # fmt: skip
    """out[e, n, k] = sum_t dy[t, n] x[t, k] of the rows t of expert e, ascending, times outer[e]; 0 of no rows."""
    high = tl.cdiv(N, ROWS)
    e = tl.program_id(1).to(tl.int64)
    count = tl.load(counts_ptr + e).to(tl.int32)
    first = tl.load(ends_ptr + e).to(tl.int64) - count
    n = tl.program_id(0) % high * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(0) // high * COLUMNS + tl.arange(0, COLUMNS)
    t = first + tl.arange(0, DEPTH)
    in_n, in_k = n < N, k < K
    a_at = dy_ptr + t[None, :] * stride_dy + n[:, None]
    b_at = x_ptr + t[:, None] * stride_x + k[None, :]
    total = sums(
        a_at, b_at, stride_dy, stride_x, in_n, in_k, count, count,
        ROWS, COLUMNS, DEPTH, READ, SPLIT_DY, SPLIT_X,
    )  # fmt: skip
    if OUTER:
        total = total * tl.load(outer_ptr + e)
    at = out_ptr + (e * N + n.to(tl.int64)[:, None]) * K + k[None, :]
    tl.store(at, total.to(out_ptr.dtype.element_ty), mask=in_n[:, None] & in_k[None, :])


def reads(
    a: Tensor, b: Tensor, rows: float, scaled: bool = False
) -> tuple[tuple[int, ...], tl.dtype, bool, bool]:
    """For a result of so many rows an expert on average: the tile, what operands are multiplied as, and which of them
    is three bfloat16 numbers. Two of float32 stay so."""
    both = a.dtype == torch.float32, b.dtype == torch.float32
    if all(both):
        return FLOAT_TILE, tl.float32, False, False
    return linear_tile(rows, any(both), scaled), READ, *both


def dgrad(
    dy_PN: Tensor,
    w_ENK: Tensor,
    K: int,
    tiles: RowTiles,
    dtype: torch.dtype,
    *,
    scales_ECB: Tensor | None = None,
    outer_E: Tensor | None = None,
    tile: tuple[int, ...] | None = None,
) -> Tensor:
    """dy[p] @ w[e] of each row's expert, [P, K], float32 sums rounded once to `dtype`.

    dy: bfloat16 or float32, contiguous; w: bfloat16, e4m3 or float32 [E, N, K or more]; scales: of its blocks of
    128 x 128, float32 [E, N/128, K/128], N rounded up; outer: float32, multiplies an expert's sums. tile: another than
    the chosen one, for tests.
    """
    (P, N), E = dy_PN.shape, len(w_ENK)
    out = torch.empty(P, K, dtype=dtype, device=dy_PN.device)
    if out.numel() == 0:
        return out
    scaled = scales_ECB is not None
    chosen, read, *split = reads(dy_PN, w_ENK, P / E, scaled)
    rows, columns, depth, warps, stages = tile or chosen
    assert not scaled or GROUP % columns == 0, f"{columns} columns of more than one block"
    tiles_V3 = tiles.of(rows)
    scales = w_ENK if scales_ECB is None else scales_ECB.contiguous()
    _dgrad[(len(tiles_V3) * triton.cdiv(K, columns),)](
        dy_PN, w_ENK, scales, w_ENK if outer_E is None else outer_E.contiguous(), out, tiles_V3,
        N, K, scales.shape[-1] if scaled else 0,
        dy_PN.stride(0), w_ENK.stride(0), w_ENK.stride(1),
        rows, columns, GROUP if scaled else depth, read, *split, scaled, outer_E is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def wgrad(
    dy_PN: Tensor,
    x_PK: Tensor,
    tiles: RowTiles,
    dtype: torch.dtype,
    *,
    outer_E: Tensor | None = None,
    tile: tuple[int, ...] | None = None,
) -> Tensor:
    """dy_e.T @ x_e of each expert's rows, [E, N, K], float32 sums rounded once to `dtype`.

    dy, x: bfloat16 or float32, rows any stride apart; outer: float32, multiplies an expert's sums.
    """
    N, K, E = dy_PN.shape[1], x_PK.shape[1], len(tiles.counts_E)
    out = torch.empty(E, N, K, dtype=dtype, device=x_PK.device)
    if out.numel() == 0:
        return out
    chosen, read, *split = reads(dy_PN, x_PK, N)
    rows, columns, depth, warps, stages = tile or chosen
    _wgrad[(triton.cdiv(N, rows) * triton.cdiv(K, columns), E)](
        dy_PN, x_PK, x_PK if outer_E is None else outer_E.contiguous(), out,
        tiles.counts_E, tiles.ends_E, N, K, dy_PN.stride(0), x_PK.stride(0),
        rows, columns, depth, read, *split, outer_E is not None,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
