"""combine: the experts' answers in slot order, float32, one rounding."""

import pytest
import torch

from unified_models.ops.combine import combine, combine_sorted
from unified_models.ops.combine.reference import combine as reference


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("slots", [1, 2, 6])
def test_combine_and_backward(check_gradients, slots: int, dtype: torch.dtype) -> None:
    y = torch.randn(7, slots, 33).to(dtype).requires_grad_()
    gates = torch.randn(7, slots).requires_grad_()
    check_gradients(
        lambda: combine(y, gates, dtype=dtype), reference_of, {"y": y, "gates": gates}, terms=33
    )


def reference_of(y: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
    return reference(y, gates)


def test_reference_gradient_by_finite_differences() -> None:
    y = torch.randn(2, 3, 4, dtype=torch.float64, requires_grad=True)
    gates = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(reference, (y, gates))


@pytest.mark.parametrize("width", [1, 33, 128])
def test_rows_keep_their_bits(check_rows, width: int) -> None:
    y, gates = torch.randn(150, 6, width), torch.rand(150, 6)
    assert check_rows(lambda y, g: combine(y, g, dtype=torch.float32), y, gates) > 0


def test_slots_are_added_first_to_last(same_bits) -> None:
    y, gates = torch.randn(20, 6, 5), torch.rand(20, 6)
    written = y[:, 0] * gates[:, :1]
    for k in range(1, 6):
        written = written + y[:, k] * gates[:, k : k + 1]
    got = combine(y, gates, dtype=torch.float32)
    assert same_bits(got, written, "in slot order") == 100
    backwards = combine(y.flip(1), gates.flip(1), dtype=torch.float32)
    assert bool((backwards != got).any()), "the order does not show here: nothing is tested"


def test_one_rounding() -> None:
    y, gates = torch.randn(50, 6, 5).bfloat16(), torch.rand(50, 6)
    wide = combine(y, gates, dtype=torch.float32)
    assert torch.equal(combine(y, gates, dtype=torch.bfloat16), wide.bfloat16())


def test_combine_sorted_and_backward(same_bits, check_gradients) -> None:
    """The bits of combine, rows read by their places; each row's gradient goes to its place."""
    y, gates = torch.randn(42, 5).requires_grad_(), torch.rand(7, 6).requires_grad_()
    place = torch.randperm(42).view(7, 6)
    for dtype in (torch.bfloat16, torch.float32):
        got = combine_sorted(y, place, gates, dtype)
        assert same_bits(got, combine(y[place], gates, dtype=dtype), str(dtype)) == 35
    check_gradients(
        lambda: combine_sorted(y, place, gates, torch.float32),
        lambda y, gates: reference(y[place], gates),
        {"y": y, "gates": gates},
        terms=33,
    )
