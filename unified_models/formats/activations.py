"""Quantisation of activations in front of an FP8 linear.

dynamic: per token and 128 channels, power-of-two scales. static: one float32 scale that a checkpoint brings.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.formats.rounding import fp8_scales, to_e4m3

GROUP = 128


def quantize_rows(x_TK: Tensor) -> tuple[Tensor, Tensor]:
    """float32 e4m3 code values [T, K'] and float32 scales [T, K'/128], K' = K rounded up to 128 (zero-filled).

    scale = 2^ceil(log2(max(amax, 1e-10) / 448)); the value that a linear sees is code * scale.
    """
    x_TK = x_TK.float()
    if x_TK.shape[-1] % GROUP:
        x_TK = F.pad(x_TK, (0, -x_TK.shape[-1] % GROUP))
    groups = x_TK.unflatten(-1, (-1, GROUP))
    scales = fp8_scales(groups.abs().amax(-1))
    codes = to_e4m3(groups / scales[..., None]).float()
    return codes.flatten(-2), scales


def dequantized_rows(x_TK: Tensor) -> Tensor:
    """The float32 values that an FP8 linear sees instead of x."""
    codes, scales = quantize_rows(x_TK)
    values: Tensor = codes.unflatten(-1, (-1, GROUP)) * scales[..., None]
    return values.flatten(-2)[..., : x_TK.shape[-1]]


def static_codes(x: Tensor, scale: Tensor) -> Tensor:
    """float32 e4m3 code values of x * (1 / scale), clamped to +-448, as samplers compute it. x: [T, K], scale: []."""
    return to_e4m3(x.float() * scale.reciprocal()).float()


class RoundTrip(torch.autograd.Function):
    """A quantiser with the straight-through derivative: q(x) = x + (q(x) - x).detach(), without the arithmetic."""

    @staticmethod
    def forward(ctx: object, x: Tensor, quantized: Tensor) -> Tensor:
        return quantized

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
