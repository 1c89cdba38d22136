"""swiglu, relu2, sigmoid, silu and softplus: clamps, their boundary, and values far out."""

import pytest
import torch
from torch import Tensor

from unified_models.ops import relu2, sigmoid, silu, softplus, swiglu, time_step
from unified_models.ops.activation.reference import relu2 as relu2_reference
from unified_models.ops.activation.reference import swiglu as reference

LIMIT = 10.0
AROUND = [9.999, 10.0, 10.001]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("limit", [None, LIMIT], ids=["no-limit", "limit10"])
def test_swiglu_and_backward(check_gradients, dtype: torch.dtype, limit: float | None) -> None:
    gate, up = ((8 * torch.randn(40, 33)).to(dtype).requires_grad_() for _ in "gu")
    check_gradients(
        lambda: swiglu(gate, up, limit),
        lambda gate, up: reference(gate, up, limit),
        {"gate": gate, "up": up},
        terms=8,
    )


TRUTHS = {
    sigmoid: torch.sigmoid,
    silu: torch.nn.functional.silu,
    softplus: torch.nn.functional.softplus,
}


@pytest.mark.parametrize("fn", TRUTHS, ids=lambda f: f.__name__)
def test_plain_ones_and_backward(check_gradients, fn) -> None:
    x = (8 * torch.randn(300)).requires_grad_()
    check_gradients(lambda: fn(x), lambda x: TRUTHS[fn](x), {"x": x}, terms=8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_relu2_and_backward(check_gradients, dtype: torch.dtype) -> None:
    x = (8 * torch.randn(40, 33)).to(dtype).requires_grad_()
    check_gradients(lambda: relu2(x), relu2_reference, {"x": x}, terms=8)


def test_silu_of_another_dtype_and_backward(same_bits) -> None:
    """One rounding, and the gradient of silu followed by the rounding."""
    x, given = (8 * torch.randn(300)).requires_grad_(), torch.randn(300).bfloat16()
    outs = [silu(x, torch.bfloat16), silu(x).to(torch.bfloat16)]
    grads = [torch.autograd.grad(y, x, given)[0] for y in outs]
    assert same_bits(*([y, g] for y, g in zip(outs, grads, strict=True)), "dtype") == 600
    assert silu(x.double()).dtype == torch.float64


def test_relu2_rounds_once_and_backward() -> None:
    """The square of a bfloat16 value is exact in float32, so one rounding; 0 has a gradient of 0, inf and NaN stay."""
    x = torch.randn(500).bfloat16()
    assert torch.equal(relu2(x), (x.double().clamp(min=0) ** 2).bfloat16())
    edge = torch.tensor([0.0, -0.0, -1e30, 1e30, torch.inf, -torch.inf, torch.nan])
    got = relu2(edge)
    assert got[:6].tolist() == [0.0, 0.0, 0.0, torch.inf, torch.inf, 0.0]
    assert bool(got[6].isnan())
    zero = torch.tensor([0.0, -0.0, -3.0, 2.0], requires_grad=True)
    relu2(zero).sum().backward()
    assert zero.grad.tolist() == [0.0, 0.0, 0.0, 4.0]


def test_softplus_above_twenty_and_backward() -> None:
    """x itself above 20, where log1p(e^x) differs by less than half an ulp; never NaN, never below 0; monotone."""
    x = torch.tensor([-1e4, -104.0, -50.0, 0.0, 19.99, 20.0, 20.01, 88.0, 1e4], requires_grad=True)
    y = softplus(x)
    want = torch.nn.functional.softplus(x.detach().double(), threshold=1000)
    assert torch.allclose(y.double(), want, rtol=2e-7, atol=1e-45)
    assert torch.equal(y[6:], x[6:])
    assert bool((y.diff() >= 0).all() and (y >= 0).all())
    y.sum().backward()
    assert torch.allclose(
        x.grad.double(), torch.sigmoid(x.detach().double()), rtol=1e-6, atol=1e-38
    )
    assert softplus(torch.tensor(-50.0)).item() > 0


def test_gradient_by_finite_differences() -> None:
    gate, up = (4 * torch.randn(30, dtype=torch.float64) for _ in "gu")
    inputs = (gate.requires_grad_(), up.requires_grad_())
    assert torch.autograd.gradcheck(lambda g, u: reference(g, u, LIMIT), inputs)
    assert torch.autograd.gradcheck(sigmoid, inputs[:1])
    assert torch.autograd.gradcheck(silu, inputs[:1])
    assert torch.autograd.gradcheck(softplus, inputs[:1])
    assert torch.autograd.gradcheck(relu2_reference, inputs[:1])


@pytest.mark.parametrize("width", [1, 7, 33, 128])
def test_rows_keep_their_bits(check_rows, width: int) -> None:
    gate, up = (8 * torch.randn(150, width) for _ in "gu")
    assert check_rows(lambda g, u: swiglu(g, u, LIMIT), gate, up) > 0
    assert check_rows(lambda g, u: swiglu(g, u), gate.bfloat16(), up.bfloat16()) > 0
    for fn in (sigmoid, silu, softplus, relu2):
        assert check_rows(fn, gate) > 0
    assert check_rows(relu2, up.bfloat16()) > 0


def independent(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The value and both derivatives, written by hand in float64 with Python numbers."""
    rows = []
    for g, u in zip(gate.tolist(), up.tolist(), strict=True):
        cut_g, cut_u = min(g, LIMIT), max(-LIMIT, min(u, LIMIT))
        s = 1 / (1 + torch.tensor(-cut_g, dtype=torch.float64).exp().item())
        d_gate = s * (1 + cut_g * (1 - s)) * cut_u * (g <= LIMIT)
        d_up = cut_g * s * (abs(u) <= LIMIT)
        rows.append((cut_g * s * cut_u, d_gate, d_up))
    return tuple(torch.tensor(rows, dtype=torch.float64).T)


def test_clamps_C23() -> None:
    """The gate is clamped above only, up both ways."""
    gates, ups = torch.tensor([-20.0, -12.0, 2.0, 20.0]), torch.tensor([-20.0, 20.0])
    gate, up = (t.flatten() for t in torch.meshgrid(gates, ups, indexing="ij"))
    want, _, _ = independent(gate, up)
    assert torch.allclose(swiglu(gate, up, LIMIT).double(), want, rtol=1e-6)
    assert swiglu(gates[3:], ups[1:], LIMIT).item() == pytest.approx(99.9954602, rel=1e-6)
    assert swiglu(gates[:1], ups[1:], LIMIT).item() == pytest.approx(-4.1223072e-07, rel=1e-6)


def test_gradient_at_the_clamp_and_backward_C24() -> None:
    """Exactly at the limit the gradient passes, just above it is zero, for gate and up; far below, gate's passes."""
    values = [*AROUND, *(-v for v in AROUND), 3.0]
    gate, up = (
        t.flatten().clone().requires_grad_()
        for t in torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij")
    )
    swiglu(gate, up, LIMIT).sum().backward()
    _, d_gate, d_up = independent(gate.detach(), up.detach())
    assert torch.equal(gate.grad == 0, d_gate == 0)
    assert torch.equal(up.grad == 0, d_up == 0)
    assert torch.allclose(gate.grad.double(), d_gate, rtol=1e-5, atol=1e-9)
    assert torch.allclose(up.grad.double(), d_up, rtol=1e-5)
    assert int((d_gate == 0).sum()) == 7
    assert int((d_up == 0).sum()) == 14


def test_far_out_and_backward() -> None:
    """exp overflows where the functions are finite: no NaN, in value or gradient."""
    x = torch.tensor([-1e4, -200.0, -89.0, 0.0, 89.0, 200.0, 1e4], requires_grad=True)
    up = torch.ones(7, requires_grad=True)
    for out in (sigmoid(x), silu(x), softplus(x), swiglu(x, up, LIMIT)):
        grads = torch.autograd.grad(out.sum(), x)
        assert bool(out.isfinite().all() and grads[0].isfinite().all())
    assert torch.equal(sigmoid(x)[[0, -1]], torch.tensor([0.0, 1.0]))


def test_one_rounding_to_bfloat16() -> None:
    gate, up = (torch.randn(500).bfloat16() for _ in "gu")
    got, want = swiglu(gate, up), swiglu(gate.float(), up.float())
    assert torch.equal(got, want.bfloat16())


def test_time_step_and_backward(check_gradients) -> None:
    """softplus of the sum, clamped on both sides; at a limit no gradient passes."""
    limit = (0.4, 1.2)
    dt, bias = torch.randn(40, 9).requires_grad_(), torch.randn(9).requires_grad_()

    def plain(dt: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(dt + bias).clamp(*limit)

    check_gradients(lambda: time_step(dt, bias, limit), plain, {"dt": dt, "bias": bias}, terms=8)
    y = time_step(dt.detach(), bias.detach(), limit)
    assert y.min() == torch.tensor(0.4) and y.max() == torch.tensor(1.2)
