"""Four-bit weights: e2m1 codes, two to a byte along K, the even column in the low nibble."""

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from unified_models.formats.kinds import Input, Packed
from unified_models.formats.rounding import (
    AMAX_FLOOR,
    ceil_power_of_two,
    exponent_value,
    to_e4m3,
)

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class MXFP4:
    """e2m1 codes, two to a byte, low nibble first; one e8m0 scale for each 32 values along K (OCP MX v1.0, 5.3).

    scale = 2^ceil(log2(max(amax, 1e-10) / 6)), so nothing saturates; codes round to nearest, ties to the even code.
    Tensors: codes uint8 [..., N, K/2], scales uint8 [..., N, K/32]. A linear reads the values in bf16 (exact) and
    does not quantise its input (W4A16, what Hopper samplers run).
    """

    name: str = "mxfp4"
    group: int = 32
    activation: torch.dtype = torch.bfloat16
    input: Input = "plain"

    def pack(self, master: Tensor) -> Packed:
        w = master.to(torch.bfloat16).float()
        if w.shape[-1] % self.group:
            raise ValueError(
                f"mxfp4 needs K a multiple of {self.group}, got a weight of shape {tuple(w.shape)}"
            )
        groups = w.unflatten(-1, (-1, self.group))
        limit = torch.tensor(E2M1[-1], dtype=torch.float32, device=w.device)
        scales = ceil_power_of_two(groups.abs().amax(-1).clamp_min(AMAX_FLOOR) / limit)
        codes = _e2m1_codes(groups / exponent_value(scales)[..., None]).flatten(-2)
        return {"codes": _pairs(codes), "scales": scales}

    def unpack(self, packed: Packed, shape: torch.Size) -> Tensor:
        groups: Tensor = _values(packed["codes"]).unflatten(-1, (-1, self.group))
        return (groups * exponent_value(packed["scales"])[..., None]).flatten(-2)


@dataclass(frozen=True)
class NVFP4:
    """e2m1 codes; one e4m3 scale for each 16 values along K; one float32 scale a matrix (ModelOpt's NVFP4).

    global = amax / (6 * largest_scale); scale = e4m3(amax of the 16 / (6 * global)), at least 2^-9, 1 where the 16 are
    zero; code = value / (scale * global) to nearest, ties to the even code. Everything in float32.

    largest_scale 448: as above. 256 is four-over-six: each 16 values take this scale or 1.5 times it, which puts their
    largest value on 4 instead of 6, whichever leaves the smaller sum of squared errors (a tie: the first).

    Tensors: codes uint8 [..., N, K/2], scales uint8 (e4m3 bytes) [..., N, K/16], global float32 [...]. A linear reads
    code * scale, which is exact in bf16, and applies the global scale to the float32 sum; it does not quantise its
    input (W4A16).
    """

    name: str
    largest_scale: int
    group: int = 16
    activation: torch.dtype = torch.bfloat16
    input: Input = "plain"

    def pack(self, master: Tensor) -> Packed:
        w = master.to(torch.bfloat16).float()
        if w.shape[-1] % self.group:
            raise ValueError(
                f"{self.name} needs K a multiple of {self.group}, got a weight of shape {tuple(w.shape)}"
            )
        divisor = torch.tensor(E2M1[-1] * self.largest_scale, dtype=torch.float32, device=w.device)
        whole = w.abs().amax((-2, -1)) / divisor
        whole = torch.where(whole == 0, torch.ones_like(whole), whole)
        groups = w.unflatten(-1, (-1, self.group))
        amax, each = groups.abs().amax(-1), whole[..., None, None]
        codes, scales = _at(groups, amax, each)
        if self.largest_scale == FOUR_OVER_SIX:
            other_codes, other_scales = _at(groups, amax * 1.5, each)
            errors = (
                _error(groups, codes, scales, each),
                _error(groups, other_codes, other_scales, each),
            )
            better = errors[1] < errors[0]
            codes = torch.where(better[..., None], other_codes, codes)
            scales = torch.where(better, other_scales, scales)
        return {"codes": _pairs(codes.flatten(-2)), "scales": scales, "global": whole}

    def scaled_codes(self, packed: Packed) -> Tensor:
        """float32 code * scale [..., N, K]; exact in bf16."""
        values: Tensor = _values(packed["codes"]).unflatten(-1, (-1, self.group))
        scaled: Tensor = values * _e4m3(packed["scales"])[..., None]
        return scaled.flatten(-2)

    def unpack(self, packed: Packed, shape: torch.Size) -> Tensor:
        values: Tensor = _values(packed["codes"]).unflatten(-1, (-1, self.group))
        scales = _e4m3(packed["scales"]) * packed["global"][..., None, None]
        scaled: Tensor = values * scales[..., None]
        return scaled.flatten(-2)


FOUR_OVER_SIX = 256
SMALLEST_SCALE = 2.0**-9


def _at(groups: Tensor, amax: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and e4m3 scale bytes of groups whose largest value counts as `amax`."""
    ratio = amax / (E2M1[-1] * whole)
    ratio = torch.where(ratio == 0, torch.ones_like(ratio), ratio).clamp_min(SMALLEST_SCALE)
    scales = to_e4m3(ratio).view(torch.uint8)
    return _e2m1_codes(groups / (_e4m3(scales) * whole)[..., None]), scales


def _error(groups: Tensor, codes: Tensor, scales: Tensor, whole: Tensor) -> Tensor:
    """Sum of squared errors of each group: halves are added until one is left, the same order on every machine."""
    values = _table(codes.device)[codes.int()] * (_e4m3(scales) * whole)[..., None]
    errors = (values - groups).square()
    while errors.shape[-1] > 1:
        half = errors.shape[-1] // 2
        errors = errors[..., :half] + errors[..., half:]
    return errors[..., 0]


def _e4m3(scales: Tensor) -> Tensor:
    return scales.view(torch.float8_e4m3fn).float()


def _e2m1_codes(x: Tensor) -> Tensor:
    """4-bit codes (sign bit 3) of float32 x; nearest, ties to the even code, 6 where |x| is larger. -0 keeps its sign,
    so that packing what was unpacked changes no byte."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for i, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        # an odd lower code loses the tie
        code += magnitude >= middle if i % 2 else magnitude > middle
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def _pairs(codes: Tensor) -> Tensor:
    """Two codes a byte, the first in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def _table(device: torch.device) -> Tensor:
    return torch.tensor(E2M1 + tuple(-v for v in E2M1), dtype=torch.float32, device=device)


def _values(pairs: Tensor) -> Tensor:
    """float32 values of the codes, twice as many columns."""
    codes = torch.stack((pairs & 0xF, pairs >> 4), -1).flatten(-2)
    values: Tensor = _table(pairs.device)[codes.int()]
    return values
