"""x @ w.T in float32 for a long K: its parts are summed side by side, then added in their order.

Parts are PART columns from the first on, so K alone says where they end. Within a part an element is one chain of fused
multiply-adds, k ascending, from zero; a second kernel adds the parts from the first to the last. Nothing of that knows
how many rows there are, and all rows have one tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.narrow_triton import lanes

LONG = 2048
"""From this K on a product is cut: with fewer columns there is little to walk. Part of what a weight's bits mean."""
PART = 256
"""Columns of a part. Of DeepSeek-V4's 16384, read for one token, 64 programs have one each."""
TILE = (16, 32, 32, 2, 6)
"""Rows, columns and depth of a tile, warps, stages; the same for any number of rows."""
BLOCK = 128
"""Elements of a program that adds parts."""
AHEAD = 32
"""Parts whose loads do not wait for each other."""
WORKSPACE = 32 << 20
"""Bytes of parts that are kept at once, so that they stay in a GPU's L2; more rows than that go in several turns."""


@triton.jit(do_not_specialize=["first", "end", "N"])
def _parts(
    x_ptr, w_ptr, parts_ptr, first, end, N, K, stride_x, stride_w,
    PART: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """parts[p, t - first, n] = sum_{k in part p} x[t, k] w[n, k], k ascending, for rows t from first to end."""
    t = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.program_id(2)
    k, left = tl.arange(0, DEPTH), K - part * PART
    row, column = t[:, None] < end, n[None, :] < N
    x_at = x_ptr + part * PART + t.to(tl.int64)[:, None] * stride_x + k[None, :]
    w_at = w_ptr + part * PART + n.to(tl.int64)[None, :] * stride_w + k[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, PART, DEPTH):
        inside = k < left - start
        x = tl.load(x_at + start, mask=row & inside[None, :], other=0.0)
        w = tl.load(w_at + start, mask=column & inside[:, None], other=0.0)
        total = tl.dot(x.to(tl.float32), w.to(tl.float32), total, input_precision="ieee")
    at = (part.to(tl.int64) * (end - first) + (t - first)[:, None]) * N + n[None, :]
    tl.store(parts_ptr + at, total, mask=row & column)


@triton.jit(do_not_specialize=["size", "count", "parts"])
def _joined(parts_ptr, out_ptr, size, count, parts, AHEAD: tl.constexpr, BLOCK: tl.constexpr):
    """out[i] = parts[0, i] + parts[1, i] + ..., of size elements and count in all, rounded once; what is past the last
    part adds 0."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    place = i
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for _ in range(0, parts, AHEAD):
        for _ahead in tl.static_range(AHEAD):
            total += tl.load(parts_ptr + place, mask=inside & (place < count), other=0.0)
            place += size
    tl.store(out_ptr + i, total.to(out_ptr.dtype.element_ty), mask=inside)


def product(
    x_TK: Tensor,
    w_NK: Tensor,
    dtype: torch.dtype = torch.float32,
    *,
    tile: tuple[int, ...] = TILE,
    part: int = PART,
    memory: int = WORKSPACE,
) -> Tensor:
    """x @ w.T, [T, N]: float32 sums, rounded once to `dtype`. x, w: float32 or bfloat16, whose values float32 holds.

    For tests: another tile or part (its bits are its own); memory, bytes of parts at once.
    """
    T, N = len(x_TK), len(w_NK)
    out = torch.empty(T, N, dtype=dtype, device=x_TK.device)
    if out.numel() == 0:
        return out
    x_TK, w_NK = lanes(x_TK), lanes(w_NK)
    K = x_TK.shape[1]
    rows, columns, depth, warps, stages = tile
    parts, tiles = max(1, triton.cdiv(K, part)), triton.cdiv(N, columns)
    turn = min(T, max(memory // (4 * parts * N) // rows, 1) * rows)
    made = torch.empty(parts * turn * N, dtype=torch.float32, device=x_TK.device)
    for first in range(0, T, turn):
        end = min(first + turn, T)
        _parts[(triton.cdiv(end - first, rows), tiles, parts)](
            x_TK, w_NK, made, first, end, N, K, x_TK.stride(0), w_NK.stride(0),
            part, rows, columns, depth, num_warps=warps, num_stages=stages,
        )  # fmt: skip
        add_parts(made, out[first:end], parts, AHEAD)
    return out


def add_parts(parts: Tensor, out: Tensor, count: int, ahead: int = 8) -> None:
    """out = the sum of `count` results of out's size, float32 and side by side in memory, first to last, rounded once.
    ahead: parts whose loads do not wait for each other; no sum notices."""
    size = out.numel()
    _joined[(triton.cdiv(size, BLOCK),)](
        parts, out, size, count * size, count, ahead, BLOCK, num_warps=4
    )
