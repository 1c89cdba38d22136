"""rms_norm: float32 throughout, one rounding."""

import pytest
import torch

from unified_models.ops import rms_norm
from unified_models.ops.rms_norm.reference import rms_norm as reference

EPS = 1e-6
WIDTHS = [1, 7, 64, 100, 256, 513]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("weighted", [True, False], ids=["weight", "plain"])
@pytest.mark.parametrize("width", [7, 64, 513])
def test_rms_norm_and_backward(
    check_gradients, width: int, weighted: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(5, 3, width).to(dtype).requires_grad_()
    leaves = {"x": x}
    if weighted:
        leaves["weight"] = torch.randn(width).requires_grad_()
    check_gradients(
        lambda: rms_norm(x, leaves.get("weight"), EPS),
        lambda x, weight=None: reference(x, weight, EPS),
        leaves,
        terms=width,
    )


def test_reference_gradient_by_finite_differences() -> None:
    x, w = (torch.randn(2, 5, dtype=torch.float64, requires_grad=True) for _ in "xw")
    assert torch.autograd.gradcheck(lambda x, w: reference(x, w[0], EPS), (x, w))


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_keep_their_bits(check_rows, width: int) -> None:
    weight = torch.randn(width)
    assert check_rows(lambda x: rms_norm(x, weight, EPS), torch.randn(150, width)) > 0
    assert check_rows(lambda x: rms_norm(x, None, EPS), torch.randn(150, 3, width)) > 0


def test_one_rounding_A11(same_bits) -> None:
    """64 bf16 rows: the weight multiplies the unrounded value. Rounding before the weight differs, so it is seen."""
    x = torch.randn(64, 256, dtype=torch.bfloat16)
    weight = 1 + 0.2 * torch.randn(256)
    once = reference(x.double(), weight.double(), EPS).bfloat16()
    twice = (reference(x.float(), None, EPS).bfloat16().float() * weight).bfloat16()
    got = rms_norm(x, weight, EPS)
    assert same_bits(got, once, "rounded once, from float64") == 64 * 256
    assert bool((got != twice).any()), "the two roundings do not differ here: nothing is tested"


def test_dtype_of_the_result() -> None:
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    wide = rms_norm(x, None, EPS, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), rms_norm(x, None, EPS))


def test_zero_row_and_backward() -> None:
    x = torch.zeros(2, 8, requires_grad=True)
    y = rms_norm(x, None, EPS)
    assert torch.equal(y, torch.zeros(2, 8))
    y.sum().backward()
    assert bool(x.grad.isfinite().all())
