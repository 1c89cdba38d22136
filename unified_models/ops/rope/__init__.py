"""Rotary position embedding on the last dims of a row."""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.operator import operator


@dataclass(frozen=True)
class Rope:
    """Angle of pair i at position t: t * frequency_i, frequency_i = theta^(-2i / dim), stretched by YaRN if `factor`.

    Pair i is dims (2i, 2i + 1), or (i, i + dim / 2) with `halves`.

    YaRN (Peng et al. 2023, 3.2) without a temperature: pairs that turn more than `beta_fast` times over
    `original_max_position_embeddings` tokens keep their frequency, those below `beta_slow` are divided by `factor`.
    """

    dim: int
    theta: float
    factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    original_max_position_embeddings: int = 0
    halves: bool = False


@functools.lru_cache(maxsize=32)
def frequencies(rope: Rope, device: torch.device) -> Tensor:
    """float32 [dim / 2], in the expressions of vLLM's tables, so that the last bit agrees with its own models."""
    steps = torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim
    base = rope.theta**steps
    if rope.factor is None:
        return (1.0 / base).to(device)

    def pair_of(turns: float) -> float:
        wavelengths = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return rope.dim * math.log(wavelengths) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_of(rope.beta_fast)), 0)
    high = min(math.ceil(pair_of(rope.beta_slow)), rope.dim - 1)
    ramp = (torch.arange(rope.dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0, 1)
    return (1.0 / (rope.factor * base) * (1 - keep) + 1.0 / base * keep).to(device)


@operator
def rope(
    x: Tensor,
    positions_T: Tensor,
    rope: Rope,
    *,
    inverse: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Rotate the last `rope.dim` dims of x by the token's angles, or back with `inverse`.

    x: [T, ..., D]; positions_T: whole numbers. float32 arithmetic, one rounding to x's dtype, or `dtype`.
    """
    dtype = dtype or x.dtype
    if x.is_cuda:
        return apply(_Rope, x, positions_T, rope, inverse, dtype)
    return _rope(x, positions_T, rope, inverse, dtype)


class _Rope(torch.autograd.Function):
    """The kernel; its gradient is the kernel's, turned back, and keeps the positions alone."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, positions_T: Tensor, rope: Rope, inverse: bool, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(positions_T)
        ctx.rope, ctx.inverse, ctx.dtype = rope, inverse, x.dtype
        return _by_kernel(x, positions_T, rope, inverse, dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        (positions_T,) = ctx.saved_tensors
        dx = _by_kernel(grads[0], positions_T, ctx.rope, not ctx.inverse, ctx.dtype)
        return dx, None, None, None, None


def _by_kernel(
    x: Tensor, positions_T: Tensor, rope: Rope, inverse: bool, dtype: torch.dtype
) -> Tensor:
    from unified_models.ops.rope import triton as kernels

    table = frequencies(rope, x.device)
    out: Tensor = kernels.rope(x, positions_T, table, rope.halves, inverse, dtype)
    return out


def _rope(x: Tensor, positions_T: Tensor, rope: Rope, inverse: bool, dtype: torch.dtype) -> Tensor:
    angles = positions_T.float()[:, None] * frequencies(rope, x.device)
    shape = (len(angles), *(1,) * (x.dim() - 2), rope.dim // 2)
    cos, sin = angles.cos().view(shape), angles.sin().view(shape)
    sin = -sin if inverse else sin
    still, turned = x[..., : -rope.dim], x[..., -rope.dim :].float()
    a, b = turned.chunk(2, -1) if rope.halves else (turned[..., 0::2], turned[..., 1::2])
    pairs = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.cat(pairs, -1) if rope.halves else torch.stack(pairs, -1).flatten(-2)
    return torch.cat((still.to(dtype), turned.to(dtype)), -1)
