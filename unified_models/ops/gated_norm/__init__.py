"""RMSNorm over groups of channels, behind a gate."""

import torch
from torch import Tensor

from unified_models.ops.activation import silu
from unified_models.ops.operator import operator
from unified_models.ops.rerun import rerun
from unified_models.ops.rms_norm import WIDEST
from unified_models.ops.rounded import rounded
from unified_models.ops.sums import row_mean


@operator
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, groups: int) -> Tensor:
    """v = x * silu(gate); v * rsqrt(mean(v^2 within its group) + eps), rounded to x's dtype, then * weight, rounded.

    x, gate: [..., N], N a multiple of groups (ValueError otherwise); weight: float32 [N]. float32 but for the two
    roundings, which is what samplers do.
    """
    if x.shape[-1] % groups:
        raise ValueError(f"{x.shape[-1]} channels do not divide into {groups} groups")
    if x.is_cuda and x.shape[-1] // groups <= WIDEST:
        from unified_models.ops.gated_norm import triton as kernels

        out: Tensor = rerun(kernels.gated_norm, _gated_norm, x, gate, weight, eps, groups)
        return out
    return _gated_norm(x, gate, weight, eps, groups)


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int) -> Tensor:
    v = (x.float() * silu(gate.float())).contiguous().unflatten(-1, (groups, -1))
    y = v * torch.rsqrt(row_mean(v.square()) + eps)
    return (weight * rounded(y.flatten(-2), x.dtype)).to(x.dtype)
