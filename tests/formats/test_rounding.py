"""The roundings against their definitions, restated with math.frexp and a table of all codes."""

import bisect
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unified_models.formats.rounding import (
    ceil_power_of_two,
    exponent_value,
    fp8_scale_bytes,
    fp8_scales,
    to_e4m3,
)

TINY = 2.0**-126  # the smallest normal float32
LARGEST = float(np.finfo(np.float32).max)


def neighbours(x: float) -> list[float]:
    """x and the float32 values on both sides of it."""
    at = np.float32(x)
    return [
        float(np.nextafter(at, np.float32(0))),
        float(at),
        float(np.nextafter(at, np.float32(np.inf))),
    ]


def ceiling(x: float) -> int:
    """The e8m0 byte of the smallest power of two >= x > 0, kept within the normal powers."""
    fraction, exponent = math.frexp(x)  # x = fraction * 2^exponent, 0.5 <= fraction < 1
    return min(max(exponent - (fraction == 0.5) + 127, 1), 254)


def scale(amax: float) -> int:
    """The scale rule, in float32 arithmetic of numpy."""
    return ceiling(float(np.maximum(np.float32(amax), np.float32(1e-10)) / np.float32(448)))


AWKWARD = [
    *(x for power in range(-126, 128) for x in neighbours(2.0**power)),
    *(x for power in range(-40, 120, 7) for x in neighbours(448 * 2.0**power)),
    *neighbours(448 * 2.0**-7),
    3.4e38,
]


def test_c07_ceiling_next_to_every_power() -> None:
    values = torch.tensor(AWKWARD, dtype=torch.float32)
    assert ceil_power_of_two(values).tolist() == [ceiling(x) for x in AWKWARD]


@pytest.mark.parametrize("x", [0.0, 1e-45, TINY / 2, TINY])
def test_c07_subnormals_and_zero_get_the_smallest_normal_power(x: float) -> None:
    byte = ceil_power_of_two(torch.tensor([x]))
    assert byte.item() == 1 and exponent_value(byte).item() == TINY >= x


@given(st.floats(TINY, LARGEST, width=32))
def test_c07_ceiling_is_tight(x: float) -> None:
    power = exponent_value(ceil_power_of_two(torch.tensor([x]))).double().item()
    assert power / 2 < x <= power or (x > 2.0**127 and power == 2.0**127)


@given(st.floats(0, LARGEST, width=32))
def test_c07_scale_is_the_rule(amax: float) -> None:
    assert fp8_scale_bytes(torch.tensor([amax])).item() == scale(amax)


def test_c07_scale_next_to_every_power() -> None:
    assert fp8_scale_bytes(torch.tensor(AWKWARD, dtype=torch.float32)).tolist() == [
        scale(x) for x in AWKWARD
    ]
    assert fp8_scale_bytes(torch.tensor([448 * 2.0**-7])).item() == 127 - 7
    assert fp8_scale_bytes(torch.tensor([0.0])).item() == scale(1e-10) > 1


def test_exponent_value_is_exact() -> None:
    values = exponent_value(torch.arange(255, dtype=torch.uint8))
    assert values.double().tolist() == [2.0 ** (byte - 127) for byte in range(255)]


CODES = [(8 + m) * 2.0 ** (e - 10) if e else m * 2.0**-9 for e in range(16) for m in range(8)][:127]


def nearest(x: float) -> int:
    """The e4m3 code of |x|: nearest, ties to the even code, the largest beyond."""
    above = bisect.bisect_left(CODES, x)
    if above == 0 or above == 127:
        return min(above, 126)
    low, high = CODES[above - 1], CODES[above]
    if x - low == high - x:
        return above - 1 if above % 2 else above
    return above if high - x < x - low else above - 1


def test_the_codes_are_those_of_the_format() -> None:
    assert torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().tolist() == CODES
    assert CODES[-1] == 448


def test_e4m3_of_every_bfloat16_value() -> None:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).float()
    values = values[~values.isnan()]
    codes = to_e4m3(values).view(torch.uint8).tolist()
    for x, code in zip(values.tolist(), codes, strict=True):
        assert code == nearest(abs(x)) | (math.copysign(1, x) < 0) << 7, x


def test_e4m3_around_every_tie() -> None:
    middles = [(low + high) / 2 for low, high in itertools.pairwise(CODES)]
    values = [x for middle in middles for x in neighbours(middle)]
    codes = to_e4m3(torch.tensor(values, dtype=torch.float32)).view(torch.uint8).tolist()
    assert codes == [nearest(x) for x in values]


def test_e4m3_saturates_and_keeps_nan() -> None:
    codes = to_e4m3(torch.tensor([449.0, 1e9, float("inf"), -1e9, -float("inf")]))
    assert codes.float().tolist() == [448, 448, 448, -448, -448]
    assert to_e4m3(torch.tensor([float("nan")])).float().isnan().all()


def test_fp8_scales_are_the_bytes_values_C07() -> None:
    """Every exponent's neighbourhood: the short way gives the value of the byte, bit for bit."""
    amax = torch.cat([torch.tensor(AWKWARD, dtype=torch.float32), torch.rand(10_000) * 1000])
    got, want = fp8_scales(amax), exponent_value(fp8_scale_bytes(amax))
    assert got.numel() > 10_000
    assert torch.equal(got.view(torch.int32), want.view(torch.int32))
