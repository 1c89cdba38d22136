"""The gradients of the gated norm in one pass over memory; the weight's by parts of the rows, which a second kernel
adds from the first to the last."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.linear.split_triton import add_parts
from unified_models.ops.rms_norm.backward_triton import share
from unified_models.ops.rms_norm.triton import tile_of
from unified_models.ops.rows import aligned, lane_of, whole_rows


@triton.jit(do_not_specialize=["R", "steps", "steps_dy", "steps_x", "steps_gate"])
def _gated_norm_backward(
    dy_ptr, x_ptr, gate_ptr, weight_ptr, dx_ptr, dgate_ptr, parts_ptr,
    R, steps, steps_dy, steps_x, steps_gate, eps,
    GROUPS: tl.constexpr, N: tl.constexpr, LANE: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Of v = x silu(gate), r = rsqrt(mean(v^2) + eps), y = v r and g = dy weight, in group program_id(1): dv = r (g - y
    mean(g y)), dx = dv silu(gate), dgate = dv x silu'(gate); parts[p] = sum of dy times y as it was rounded."""
    n = tl.arange(0, WIDTH)
    first = tl.program_id(1) * N
    weight = tl.load(weight_ptr + first + n, mask=n < N, other=0.0)[None, :]
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for step in range(steps):
        r = (tl.program_id(0) * steps + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        inside = (r[:, None] < R) & (n[None, :] < N)
        at, r = first + n[None, :], r[:, None]
        x = tl.load(x_ptr + r * (steps_x * LANE) + at, mask=inside, other=0.0).to(tl.float32)
        gate = tl.load(gate_ptr + r * (steps_gate * LANE) + at, mask=inside, other=0.0)
        dy = tl.load(dy_ptr + r * (steps_dy * LANE) + at, mask=inside, other=0.0).to(tl.float32)
        gate = gate.to(tl.float32)
        spread = 1 + tl.exp(-gate)
        sigmoid, silu = 1 / spread, gate / spread
        v = x * silu
        inverse = tl.rsqrt(tl.sum(v * v, axis=1) / N + eps)[:, None]
        y = v * inverse
        rounded = y.to(dx_ptr.dtype.element_ty).to(tl.float32)
        total += tl.sum(dy * rounded, axis=0)
        g = dy * weight
        dv = inverse * (g - y * (tl.sum(g * y, axis=1) / N)[:, None])
        dx = dv * silu
        dgate = dv * x * sigmoid * (1 + gate * (1 - sigmoid))
        place = r * (GROUPS * N) + at
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(dgate_ptr + place, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    at = tl.program_id(0).to(tl.int64) * (GROUPS * N) + first + n
    tl.store(parts_ptr + at, total, mask=n < N)


def gated_norm_backward(
    dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dgate in their dtypes and dweight, float32 [N]. dy, x, gate: [..., N] in bfloat16 or float32."""
    dx, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate))
    dweight = torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
    if dx.numel() == 0:
        return dx, dgate, dweight
    N = x.shape[-1] // groups
    lane, (rows, width, warps) = lane_of(N), tile_of(N)
    (dys, steps_dy), (xs, steps_x), (gates, steps_gate) = (
        whole_rows(t, lane) for t in (dy, x, gate)
    )
    R = len(xs)
    steps, parts = share(R, rows)
    made = torch.empty(parts, x.shape[-1], dtype=torch.float32, device=x.device)
    _gated_norm_backward[(parts, groups)](
        dys, xs, gates, aligned(weight.float()), dx, dgate, made,
        R, steps, steps_dy, steps_x, steps_gate, eps,
        groups, N, lane, rows, width, num_warps=warps,
    )  # fmt: skip
    add_parts(made, dweight, parts)
    return dx, dgate, dweight
