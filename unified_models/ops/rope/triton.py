"""The rotation in one pass over the rows: angles, cosines and sines once for the heads of a program. An element's bits
are its own, so tiles and alignment are free."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
"""Values that a program with several heads reads at a time."""
MANY = 512
"""Tokens from which on a program has all heads of one: they are programs enough, and each computes the angles."""


@triton.jit
def _rope(
    x_ptr, positions_ptr, table_ptr, out_ptr, stride_t, stride_h,
    H: tl.constexpr, D: tl.constexpr, R: tl.constexpr, HALVES: tl.constexpr, INVERSE: tl.constexpr,
    PROGRAMS: tl.constexpr, TIMES: tl.constexpr, HEADS: tl.constexpr,
    STILL: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """TIMES * HEADS rows of one token: D - R dims are copied, each of the last R is x cos +- (its partner) sin."""
    t = tl.program_id(0).to(tl.int64) // PROGRAMS
    head = tl.program_id(0) % PROGRAMS * (TIMES * HEADS)
    d = tl.arange(0, TURNED)
    if HALVES:
        first = d < R // 2
        pair = tl.where(first, d, d - R // 2)
        partner = tl.where(first, d + R // 2, d - R // 2)
    else:
        first, pair, partner = d % 2 == 0, d // 2, d ^ 1
    position = tl.load(positions_ptr + t).to(tl.float32)
    angle = position * tl.load(table_ptr + pair, mask=d < R, other=0.0)
    cos, sin = tl.cos(angle)[None, :], tl.sin(angle)
    sin = tl.where(first == INVERSE, sin, -sin)[None, :]
    still, d, partner = tl.arange(0, STILL)[None, :], d[None, :], partner[None, :]
    for _ in range(TIMES):
        h = head + tl.arange(0, HEADS)[:, None]
        rows, outs = x_ptr + t * stride_t + h * stride_h, out_ptr + (t * H + h) * D
        if R < D:
            inside = (h < H) & (still < D - R)
            x = tl.load(rows + still, mask=inside, other=0.0)
            tl.store(outs + still, x.to(out_ptr.dtype.element_ty), mask=inside)
        inside = (h < H) & (d < R)
        x = tl.load(rows + (D - R) + d, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(rows + (D - R) + partner, mask=inside, other=0.0).to(tl.float32)
        y = x * cos + other * sin
        tl.store(outs + (D - R) + d, y.to(out_ptr.dtype.element_ty), mask=inside)
        head += HEADS


def rope(
    x: Tensor,
    positions_T: Tensor,
    table: Tensor,
    halves: bool,
    inverse: bool,
    dtype: torch.dtype,
) -> Tensor:
    """x with its last dims turned, in `dtype`, contiguous. x: [T, ..., D] of any float dtype, at any strides;
    positions: int32 or int64 [T]; table: float32 [R / 2], the frequencies of the last R dims."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    T, D, R = len(x), x.shape[-1], 2 * len(table)
    rows_THD = x.reshape(T, -1, D)
    rows_THD = rows_THD if rows_THD.stride(2) == 1 else rows_THD.contiguous()
    H, width = rows_THD.shape[1], triton.next_power_of_2(D)
    heads = min(triton.next_power_of_2(H), max(BLOCK // width, 1))
    blocks = triton.cdiv(H, heads)
    times = blocks if T >= MANY else 1
    programs = triton.cdiv(blocks, times)
    _rope[(T * programs,)](
        rows_THD, positions_T.contiguous(), table, out, rows_THD.stride(0), rows_THD.stride(1),
        H, D, R, halves, inverse, programs, times, heads,
        triton.next_power_of_2(max(D - R, 1)), triton.next_power_of_2(R),
        num_warps=min(max(heads * width // 1024, 1), 8), enable_fp_fusion=False,
    )  # fmt: skip
    return out
