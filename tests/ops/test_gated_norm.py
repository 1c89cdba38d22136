"""gated_norm: gate, then the norm of each group of channels, with two roundings."""

import pytest
import torch
from torch import Tensor

from unified_models.ops import gated_norm
from unified_models.ops.gated_norm.reference import gated_norm as reference

EPS = 1e-5
DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("groups", [1, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [8, 56, 256])
def test_gated_norm_and_backward_D10(check_gradients, width: int, dtype, groups: int) -> None:
    """Against the norm group by group in float64, rounded straight through before the weight. bfloat16: a value that
    float32 puts on the other side of a rounding boundary is off by 2^-8 of itself."""
    x, gate = ((2 * torch.randn(30, width)).to(dtype).requires_grad_() for _ in "xg")
    weight = (1 + 0.2 * torch.randn(width)).requires_grad_()

    def rounded_then_weighed(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
        v = reference(x, gate, torch.ones_like(weight), EPS, groups)
        return (v + (v.detach().float().to(dtype).double() - v).detach()) * weight

    check_gradients(
        lambda: gated_norm(x, gate, weight, EPS, groups=groups),
        rounded_then_weighed,
        {"x": x, "gate": gate, "weight": weight},
        terms=width + 40 if dtype == torch.float32 else 1 << 15,
    )


def test_reference_gradient_by_finite_differences() -> None:
    shapes = ((3, 8), (3, 8), (8,))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda x, z, w: reference(x, z, w, EPS, 2), inputs)


def test_a_group_knows_nothing_of_the_others(same_bits) -> None:
    """Each group alone has the bits that it has among eight; one norm over all of them has others."""
    x, gate, weight = torch.randn(20, 256), torch.randn(20, 256), torch.randn(256)
    whole, count = gated_norm(x, gate, weight, EPS, groups=8), 0
    for g in range(8):
        part = slice(32 * g, 32 * g + 32)
        alone = gated_norm(x[:, part], gate[:, part], weight[part], EPS, groups=1)
        count += same_bits(alone, whole[:, part], f"group {g}")
    assert count == whole.numel() > 0
    assert not torch.allclose(gated_norm(x, gate, weight, EPS, groups=1), whole, rtol=1e-2)


@pytest.mark.parametrize(("width", "groups"), [(56, 8), (33, 1), (96, 2), (4096, 8)], ids=str)
def test_rows_keep_their_bits(check_rows, width: int, groups: int) -> None:
    """4096 in 8 groups: the 30B's."""
    x, gate, weight = (torch.randn(150, width), torch.randn(150, width), torch.randn(width))
    assert check_rows(lambda x, z: gated_norm(x, z, weight, EPS, groups=groups), x, gate) > 0
    half = (x.bfloat16(), gate.bfloat16())
    assert check_rows(lambda x, z: gated_norm(x, z, weight, EPS, groups=groups), *half) > 0


def test_two_roundings() -> None:
    """The normalised row is rounded, then its product with the weight: not one rounding, and not the gate's product."""
    x, gate = ((2 * torch.randn(200, 64)).bfloat16() for _ in "xg")
    weight = (1 + 0.2 * torch.randn(64)).bfloat16().float()
    got = gated_norm(x, gate, weight, EPS, groups=2)
    assert got.dtype == torch.bfloat16
    wide = [t.double() for t in (x, gate)]
    normed = reference(*wide, torch.ones(64).double(), EPS, 2)
    two = (normed.bfloat16().double() * weight.double()).bfloat16()
    one = (normed * weight.double()).bfloat16()
    gated = (wide[0] * wide[1] * torch.sigmoid(wide[1])).bfloat16().double()
    before = [p / (p.square().mean(-1, keepdim=True) + EPS).sqrt() for p in gated.chunk(2, -1)]
    early = (torch.cat(before, -1).bfloat16().double() * weight.double()).bfloat16()
    unequal = [float((got != other).float().mean()) for other in (two, one, early)]
    assert unequal[0] < 0.005
    assert min(unequal[1:]) > 0.05


def test_far_gates_and_backward() -> None:
    """exp overflows in silu where the function is 0 or the identity: no NaN, in value or gradient."""
    gate = torch.tensor([[-1e4, -89.0, 0.0, 89.0, 1e4, 1.0]]).requires_grad_()
    x, weight = torch.ones(1, 6).requires_grad_(), torch.ones(6).requires_grad_()
    out = gated_norm(x, gate, weight, EPS, groups=1)
    grads = torch.autograd.grad(out.square().sum(), (x, gate, weight))
    assert all(bool(t.isfinite().all()) for t in (out, *grads))
    assert out[0, 0].item() == 0


def test_channels_divide_into_groups() -> None:
    x = torch.zeros(1, 20)
    with pytest.raises(ValueError, match="20 channels do not divide into 3 groups"):
        gated_norm(x, x, torch.ones(20), EPS, groups=3)
