"""Sums within rows for any GPU that Triton knows. As in `products_triton`, nothing is specialised on what a call
brings, so the layout of threads follows from the block alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Values that one program adds at a time: of one row, or of several short ones."""


@triton.jit(do_not_specialize=["R", "N"], do_not_specialize_on_alignment=["x_ptr", "out_ptr"])
def _row_sum(x_ptr, out_ptr, R, N, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """out[r] = sum_n x[r, n]: the tree of tl.sum over WIDTH values, block sums added in order."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    for start in range(0, N, WIDTH):
        n = start + tl.arange(0, WIDTH)
        x = tl.load(
            x_ptr + r[:, None] * N + n[None, :], mask=(r[:, None] < R) & (n[None, :] < N), other=0.0
        )
        total += tl.sum(x, axis=1)
    tl.store(out_ptr + r, total, mask=r < R)


@triton.jit(do_not_specialize=["R", "N"], do_not_specialize_on_alignment=["x_ptr", "out_ptr"])
def _running_sum(x_ptr, out_ptr, R, N, ROWS: tl.constexpr):
    """out[r, n] = x[r, 0] + ... + x[r, n]: written adds in float64, each sum rounded, as torch's on CPU."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros((ROWS,), dtype=tl.float64)
    for n in range(N):
        total += tl.load(x_ptr + r * N + n, mask=r < R, other=0.0).to(tl.float64)
        tl.store(out_ptr + r * N + n, total.to(tl.float32), mask=r < R)


def row_sum(x: Tensor) -> Tensor:
    """float32 [..., N] to [..., 1]. The width of a block is that of the row, at most 1024."""
    x = x.contiguous()
    *rows, N = x.shape
    out = torch.zeros(*rows, 1, dtype=torch.float32, device=x.device)
    width = min(max(triton.next_power_of_2(N), 16), BLOCK)
    if x.numel():
        _row_sum[(triton.cdiv(out.numel(), BLOCK // width),)](
            x, out, out.numel(), N, BLOCK // width, width, num_warps=4
        )
    return out


def running_sum(x: Tensor) -> Tensor:
    """float32 [..., N]."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if x.numel():
        rows = x.numel() // x.shape[-1]
        _running_sum[(triton.cdiv(rows, 128),)](x, out, rows, x.shape[-1], 128, num_warps=4)
    return out
