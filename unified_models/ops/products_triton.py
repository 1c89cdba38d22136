"""The matrix product of a stack, for any GPU that Triton knows: one order of summation, one compiled kernel.

Nothing is specialised on a size, a stride or an address, so no call can get another layout of threads, or another order
of sums, than its neighbour.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, COLUMNS, DEPTH = 16, 64, 32
SIZES = [
    "M",
    "N",
    "K",
    "stride_ab",
    "stride_am",
    "stride_ak",
    "stride_bb",
    "stride_bk",
    "stride_bn",
]
POINTERS = ["a_ptr", "b_ptr", "out_ptr"]


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=POINTERS)
def _product(
    a_ptr, b_ptr, out_ptr, M, N, K,
    stride_ab, stride_am, stride_ak, stride_bb, stride_bk, stride_bn,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """out[b, m, n] = sum_k a[b, m, k] b[b, k, n], k ascending in blocks of DEPTH; what lies outside counts as 0."""
    n = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    batch = tl.program_id(2).to(tl.int64)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, K, DEPTH):
        k = start + tl.arange(0, DEPTH).to(tl.int64)
        a_at = batch * stride_ab + m[:, None] * stride_am + k[None, :] * stride_ak
        b_at = batch * stride_bb + k[:, None] * stride_bk + n[None, :] * stride_bn
        a = tl.load(a_ptr + a_at, mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        b = tl.load(b_ptr + b_at, mask=(k[:, None] < K) & (n[None, :] < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    at = (batch * M + m[:, None]) * N + n[None, :]
    tl.store(out_ptr + at, total, mask=(m[:, None] < M) & (n[None, :] < N))


def product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, float32 [B, M, N], of a [B, M, K] and b [B, K, N] in any memory order; row m of the result depends on
    row m of a and on b alone."""
    (B, M, K), N = a.shape, b.shape[-1]
    out = torch.empty(B, M, N, dtype=torch.float32, device=a.device)
    if out.numel() == 0:
        return out
    grid = (triton.cdiv(N, COLUMNS), triton.cdiv(M, ROWS))
    for first in range(0, B, MOST):
        part = slice(first, first + MOST)
        _product[(*grid, len(out[part]))](
            a[part], b[part], out[part], M, N, K, *a.stride(), *b.stride(),
            ROWS, COLUMNS, DEPTH, num_warps=4, num_stages=2,
        )  # fmt: skip
    return out


MOST = 65535
"""Products of one launch: a grid's third dimension is no longer."""
