"""Roundings that several formats share. Every function is elementwise, so a value's bits never depend on its place."""

import torch
from torch import Tensor

E4M3_MAX = 448.0
AMAX_FLOOR = 1e-10  # keeps an all-zero block's scale positive, so zeros stay zeros
MANTISSA = 0x7FFFFF  # the bits of a float32 below its exponent


def ceil_power_of_two(x: Tensor) -> Tensor:
    """The biased exponent byte of the smallest power of two >= x, for positive float32 x.

    Read off the bits - a mantissa that is not zero carries into the exponent - since log2 and pow round, and would
    miss by one next to a power of two. uint8 in 1 .. 254, value 2^(byte - 127).
    """
    bits = x.contiguous().view(torch.int32)
    return ((bits + MANTISSA) >> 23).clamp(1, 254).to(torch.uint8)


def exponent_value(byte: Tensor) -> Tensor:
    """The float32 power of two that an e8m0 byte stands for: 2^(byte - 127); byte 0 is the subnormal 2^-127."""
    bits = byte.to(torch.int32) << 23
    return torch.where(byte == 0, torch.full_like(bits, 1 << 22), bits).view(torch.float32)


def to_e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn codes of float32 x, round to nearest even, clamped to +-448 first: the cast alone gives NaN in
    some torch versions and saturates in others. NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def _fp8_ratio(amax: Tensor) -> Tensor:
    limit = torch.full((), E4M3_MAX, dtype=torch.float32, device=amax.device)
    return amax.clamp_min(AMAX_FLOOR) / limit


def fp8_scale_bytes(amax: Tensor) -> Tensor:
    """The one rule for power-of-two FP8 scales: 2^ceil(log2(max(amax, 1e-10) / 448)), as an e8m0 byte."""
    return ceil_power_of_two(_fp8_ratio(amax))


def fp8_scales(amax: Tensor) -> Tensor:
    """`exponent_value(fp8_scale_bytes(amax))` in fewer steps: the exponent bits after the carry are the float32."""
    bits = _fp8_ratio(amax).view(torch.int32)
    return ((bits + MANTISSA) & ~MANTISSA).view(torch.float32)
