"""rope: the last dims turn by the token's angles; frequencies with and without YaRN."""

import math

import pytest
import torch
from torch import Tensor

from unified_models.ops import Rope, rope
from unified_models.ops.rope import frequencies
from unified_models.ops.rope.reference import rope as reference

PLAIN = Rope(8, 10000.0)
YARN = Rope(64, 160000.0, 16.0, 32.0, 1.0, 65536)
CPU = torch.device("cpu")


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(5, 8), (5, 3, 11), (5, 2, 3, 8)], ids=str)
def test_rope_and_backward(check_gradients, shape, dtype: torch.dtype, inverse: bool) -> None:
    positions_T = torch.tensor([0, 1, 5, 63, 20])
    x = torch.randn(shape).to(dtype).requires_grad_()
    check_gradients(
        lambda: rope(x, positions_T, PLAIN, inverse=inverse),
        lambda x: reference(x, positions_T, frequencies(PLAIN, CPU), inverse=inverse),
        {"x": x},
        terms=2 * 63,  # an angle of 63 is off by half an ulp of 63
    )


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
def test_halves_and_backward(check_gradients, inverse: bool) -> None:
    """Dims (i, i + dim / 2) are a pair: the interleaved reference, with the dims in another order."""
    positions_T = torch.tensor([0, 1, 5, 63, 20])
    table = Rope(8, 10000.0, halves=True)
    pairs = torch.arange(8).view(2, 4).T.flatten()  # 0 4 1 5 2 6 3 7
    order = torch.cat((torch.arange(3), 3 + pairs))

    def halves(x: Tensor) -> Tensor:
        turned = reference(x[..., order], positions_T, frequencies(table, CPU), inverse=inverse)
        return turned[..., order.argsort()]

    x = torch.randn(5, 2, 11).requires_grad_()
    check_gradients(
        lambda: rope(x, positions_T, table, inverse=inverse), halves, {"x": x}, terms=2 * 63
    )


def test_reference_gradient_by_finite_differences() -> None:
    x = torch.randn(3, 10, dtype=torch.float64, requires_grad=True)
    f = frequencies(PLAIN, CPU)
    assert torch.autograd.gradcheck(lambda x: reference(x, torch.arange(3), f), (x,))


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize("table", [PLAIN, YARN], ids=["plain", "yarn"])
def test_rows_keep_their_bits(check_rows, table: Rope, inverse: bool) -> None:
    count = check_rows(
        lambda x, positions_T: rope(x, positions_T, table, inverse=inverse),
        torch.randn(150, 3, table.dim + 5),
        torch.randint(0, 1 << 20, (150,)),
    )
    assert count > 0


def turns(dim: int, theta: float, original: int, i: int) -> float:
    """How often pair i turns over the original context."""
    return original / (2 * math.pi) * theta ** (-2 * i / dim)


def test_yarn_frequencies() -> None:
    """V4: pairs up to 15 keep their frequency, from 25 on they are divided by 16, linear in between; 15 is the last
    that turns more than 32 times over 65536 tokens, 25 the first that turns less than once."""
    got = frequencies(YARN, CPU).double()
    plain = torch.tensor([160000.0 ** (-2 * i / 64) for i in range(32)], dtype=torch.float64)
    assert torch.allclose(got[:16], plain[:16], rtol=4e-7)
    assert torch.allclose(got[25:], plain[25:] / 16, rtol=4e-7)
    ramp = (torch.arange(16, 25).double() - 15) / 10
    assert torch.allclose(got[16:25], plain[16:25] * (1 - ramp + ramp / 16), rtol=4e-6)
    assert turns(64, 160000.0, 65536, 15) > 32 > turns(64, 160000.0, 65536, 16)
    assert turns(64, 160000.0, 65536, 24) > 1 > turns(64, 160000.0, 65536, 25)


def test_plain_frequencies() -> None:
    want = torch.tensor([10000.0 ** (-2 * i / 8) for i in range(4)], dtype=torch.float64)
    assert torch.allclose(frequencies(PLAIN, CPU).double(), want, rtol=4e-7)


def test_long_positions_B16() -> None:
    """Positions 10, 4692, 60000 against float64: the float32 angle t * f is off by half an ulp of it at most."""
    positions_T, f = torch.tensor([10, 4692, 60000]), frequencies(YARN, CPU)
    x = torch.randn(3, 64)
    want = reference(x.double(), positions_T, f.double())
    error = (rope(x, positions_T, YARN).double() - want).abs().amax(-1)
    reach = x.abs().amax(-1).double() * 2
    assert bool((error <= reach * (positions_T.double() * 2**-23 + 1e-6)).all())


def test_inverse_undoes(same_bits) -> None:
    x, positions_T = torch.randn(4, 2, 12), torch.tensor([0, 3, 1000, 70000])
    back = rope(rope(x, positions_T, PLAIN), positions_T, PLAIN, inverse=True)
    assert torch.allclose(back, x, atol=2e-6)  # two float32 rotations
    assert same_bits(rope(x, positions_T, PLAIN)[..., :4], x[..., :4].contiguous(), "still") == 32


def test_position_zero_and_dtype(same_bits) -> None:
    x = torch.randn(2, 8)
    zero: Tensor = torch.zeros(2, dtype=torch.int64)
    assert same_bits(rope(x, zero, PLAIN), x, "position 0") == 16
    wide = rope(x, torch.tensor([3, 4]), PLAIN)
    assert rope(x, torch.tensor([3, 4]), PLAIN, dtype=torch.bfloat16).equal(wide.bfloat16())
