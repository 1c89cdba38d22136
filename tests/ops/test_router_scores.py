"""sqrt_softplus: the router's scores, near zero, far out, and their slope."""

import math

import pytest
import torch

from unified_models.ops import route_weights, sqrt_softplus
from unified_models.ops.router_scores import reference as plain
from unified_models.ops.router_scores.reference import sqrt_softplus as reference


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_sqrt_softplus_and_backward(check_gradients, spread: float) -> None:
    x = (spread * torch.randn(40, 9)).requires_grad_()
    check_gradients(lambda: sqrt_softplus(x), reference, {"x": x}, terms=8)


def test_gradient_by_finite_differences() -> None:
    x = (4 * torch.randn(30, dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(reference, (x,))
    assert torch.autograd.gradcheck(sqrt_softplus, (x,))


@pytest.mark.parametrize("experts", [1, 8, 33, 256])
def test_rows_keep_their_bits(check_rows, experts: int) -> None:
    assert check_rows(sqrt_softplus, 8 * torch.randn(150, experts)) > 0


def test_both_sides_of_20_and_backward() -> None:
    """From 20 on softplus(x) is x, in float32 to the last bit; the slope is sigmoid's on both sides."""
    x = torch.tensor([19.999998, 20.0, 20.000002, 30.0], requires_grad=True)
    y = sqrt_softplus(x)
    y.sum().backward()
    want = [math.sqrt(v + math.log1p(math.exp(-v))) for v in x.tolist()]
    assert torch.allclose(y.double(), torch.tensor(want, dtype=torch.float64), rtol=2e-7)
    slope = [1 / (1 + math.exp(-v)) / (2 * w) for v, w in zip(x.tolist(), want, strict=True)]
    assert torch.allclose(x.grad.double(), torch.tensor(slope, dtype=torch.float64), rtol=3e-7)


def test_far_below_and_backward() -> None:
    """log1p keeps softplus(-16.6) and below apart from zero; where float32 has no more, slope and value are 0."""
    x = torch.tensor([-16.6, -50.0, -100.0, -200.0, -1e4], requires_grad=True)
    y = sqrt_softplus(x)
    y.sum().backward()
    want = torch.tensor([math.exp(v / 2) for v in (-16.6, -50.0, -100.0)], dtype=torch.float64)
    assert torch.allclose(y[:2].double(), want[:2], rtol=1e-6)
    assert abs(y[2].item() - want[2].item()) < 1e-23  # exp(-100) is subnormal in float32
    assert torch.equal(y[3:], torch.zeros(2))
    assert bool(x.grad.isfinite().all())
    assert torch.allclose(x.grad[:2].double(), want[:2] / 2, rtol=1e-6)
    assert torch.equal(x.grad[3:], torch.zeros(2))


def test_route_weights_and_backward(check_gradients) -> None:
    """Of distinct experts: they sum to the scaling, and the gradient goes to the chosen scores alone."""
    scores = (torch.rand(40, 9) + 0.1).requires_grad_()
    ids = torch.rand(40, 9).argsort(1)[:, :3]
    check_gradients(
        lambda: route_weights(scores, ids, 2.5),
        lambda scores: plain.route_weights(scores, ids, 2.5),
        {"scores": scores},
        terms=8,
    )
    sums = route_weights(scores.detach(), ids, 2.5).double().sum(1)
    assert torch.allclose(sums, torch.full_like(sums, 2.5), rtol=1e-6)


def test_rows_of_route_weights_keep_their_bits(check_rows) -> None:
    ids = torch.rand(150, 32).argsort(1)[:, :6]
    assert (
        check_rows(lambda scores, ids: route_weights(scores, ids, 1.5), torch.rand(150, 32), ids)
        > 0
    )
