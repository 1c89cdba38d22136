"""The gated norm in one pass over memory. A block has the width of a group, whose threads follow from that alone."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rms_norm.triton import tile_of
from unified_models.ops.rows import aligned, lane_of, whole_rows


@triton.jit(do_not_specialize=["R", "steps_x", "steps_gate"])
def _gated_norm(
    x_ptr, gate_ptr, weight_ptr, out_ptr, R, steps_x, steps_gate, eps,
    GROUPS: tl.constexpr, N: tl.constexpr, LANE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Group g of row r: v = x silu(gate), y = v rsqrt(mean(v^2) + eps), rounded, times weight. N: values of a group."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, WIDTH)
    first = tl.program_id(1) * N
    inside = (r[:, None] < R) & (n[None, :] < N)
    x_at = x_ptr + r[:, None] * (steps_x * LANE) + first + n[None, :]
    gate_at = gate_ptr + r[:, None] * (steps_gate * LANE) + first + n[None, :]
    x = tl.load(x_at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_at, mask=inside, other=0.0).to(tl.float32)
    v = x * (gate / (1 + tl.exp(-gate)))
    squares = tl.sum(v * v, axis=1)  # one tree, which no count of rows moves
    y = (v * tl.rsqrt(squares / N + eps)[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32)
    y = y * tl.load(weight_ptr + first + n, mask=n < N, other=0.0)[None, :]
    out_at = out_ptr + r[:, None] * (GROUPS * N) + first + n[None, :]
    tl.store(out_at, y.to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    """[..., N] in x's dtype. x, gate: [..., N] in bfloat16 or float32, rows any stride apart; weight: float32 [N]."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel() == 0:
        return out
    N = x.shape[-1] // groups
    lane = lane_of(N)
    (flat, steps_x), (gates, steps_gate) = whole_rows(x, lane), whole_rows(gate, lane)
    rows, width, warps = tile_of(N)
    _gated_norm[(triton.cdiv(len(flat), rows), groups)](
        flat, gates, aligned(weight.float()), out, len(flat), steps_x, steps_gate, eps,
        groups, N, lane, rows, width, num_warps=warps,
    )  # fmt: skip
    return out
