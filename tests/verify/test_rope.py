"""Field case B16: rotary embedding at long positions, against float64 maths."""

import math

import pytest
import torch

from unified_models.ops import Rope, rope

PLAIN = Rope(64, 10000.0)
YARN = Rope(
    64, 160000.0, factor=16.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=65536
)


def frequency(kind: Rope, pair: int) -> float:
    """Of one pair, in float64, from the paper's formulas."""
    f = kind.theta ** (-2 * pair / kind.dim)
    if kind.factor is None:
        return f

    def turns_at(turns: float) -> float:
        length = kind.original_max_position_embeddings / (2 * math.pi * turns)
        return kind.dim * math.log(length) / (2 * math.log(kind.theta))

    low, high = (
        max(math.floor(turns_at(kind.beta_fast)), 0),
        min(math.ceil(turns_at(kind.beta_slow)), kind.dim - 1),
    )
    stretched = min(max((pair - low) / (high - low), 0.0), 1.0)
    return f / kind.factor * stretched + f * (1 - stretched)


@pytest.mark.parametrize("kind", [PLAIN, YARN], ids=["plain", "yarn"])
@pytest.mark.parametrize("position", [10, 4692, 60000])
def test_b16_long_positions(kind: Rope, position: int) -> None:
    x = torch.randn(3, 2, 96)
    positions = torch.full((3,), position)
    got = rope(x, positions, kind)
    assert torch.equal(got[..., :32], x[..., :32])
    even, odd = x[..., 32::2].double(), x[..., 33::2].double()
    f = torch.tensor([frequency(kind, pair) for pair in range(32)], dtype=torch.float64)
    cos, sin = (position * f).cos(), (position * f).sin()
    wanted = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    # The angle is a float32 product of a float32 frequency: four roundings of it, each of 2^-24 of the angle.
    angle = (4 * 2**-24 * position * f).repeat_interleave(2)
    size = (even.square() + odd.square()).sqrt().repeat_interleave(2, -1)
    assert ((got[..., 32:].double() - wanted).abs() <= size * (angle + 1e-6)).all()
    back = rope(got, positions, kind, inverse=True)
    assert torch.allclose(back, x, atol=1e-5)
