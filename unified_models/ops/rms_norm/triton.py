"""RMSNorm in one pass over memory. A block has the width of a row, whose threads follow from N alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rows import aligned, lane_of, whole_rows

BLOCK = 1024
"""Values of a program with several rows."""


@triton.jit(do_not_specialize=["R", "steps"])
def _rms_norm(
    x_ptr, weight_ptr, out_ptr, R, steps, eps,
    N: tl.constexpr, LANE: tl.constexpr, WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """out[r] = x[r] rsqrt(mean(x[r]^2) + eps) weight; a row of x begins every steps * LANE elements."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, WIDTH)
    inside = (r[:, None] < R) & (n[None, :] < N)
    x_at = x_ptr + r[:, None] * (steps * LANE) + n[None, :]
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    squares = tl.sum(x * x, axis=1)  # one tree, which no count of rows moves
    y = x * tl.rsqrt(squares / N + eps)[:, None]
    if WEIGHTED:
        y = y * tl.load(weight_ptr + n, mask=n < N, other=0.0)[None, :]
    tl.store(out_ptr + r[:, None] * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) * weight in `dtype`. x: [..., N] in bfloat16 or float32, rows any
    stride apart; weight: float32 [N] or None."""
    N = x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if out.numel() == 0:
        return out
    lane = lane_of(N)
    flat, steps = whole_rows(x, lane)
    weight = None if weight is None else aligned(weight.float())
    rows, width, warps = tile_of(N)
    _rms_norm[(triton.cdiv(len(flat), rows),)](
        flat, flat if weight is None else weight, out, len(flat), steps, eps,
        N, lane, weight is not None, rows, width, num_warps=warps,
    )  # fmt: skip
    return out


def tile_of(N: int) -> tuple[int, int, int]:
    """Rows of a program, the width of its block, and its warps, for rows of N values."""
    width = max(triton.next_power_of_2(N), 16)
    rows = max(BLOCK // width, 1)
    return rows, width, min(max(rows * width // 512, 1), 8)
