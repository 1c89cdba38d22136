"""Token-local kernels on a GPU: right by a tolerance, one row's bits whatever stands beside it, and gradients."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import compare_bits, shifted, wide_rows
from unified_models.ops import (
    gated_norm,
    relu2,
    rms_norm,
    sigmoid,
    silu,
    softplus,
    sqrt_softplus,
    swiglu,
)

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 1000)
PLACES = (0, 5, 196)
EPS = 1e-5
DTYPES = (torch.bfloat16, torch.float32)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (2 * torch.randn(*shape)).to(dtype).cuda()


def close(got: Tensor, want: Tensor) -> None:
    """Two roundings to bfloat16, or float32 arithmetic, off the same on a CPU."""
    assert got.dtype == want.dtype
    off = 2e-5 if got.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got.cpu().double(), want.double(), rtol=off, atol=1e-5)


def check(op: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Values and gradients of the CPU's; then the bits of rows in packs of every size and place, next to NaN, strided,
    at an odd address."""
    assert len(inputs[0]) == 1200
    leaves = [x.clone().requires_grad_() for x in inputs]
    on_cpu = [x.detach().cpu().requires_grad_() for x in inputs]
    whole, want = op(*leaves), op(*on_cpu)
    close(whole.detach(), want.detach())
    given = torch.randn(want.shape).to(want.dtype)
    grads = torch.autograd.grad(whole, leaves, given.cuda())
    for got, truth in zip(grads, torch.autograd.grad(want, on_cpu, given), strict=True):
        close(got / truth.abs().max().cuda(), truth / truth.abs().max())
    whole, count = whole.detach(), 0
    packs = [slice(p, p + n) for n, p in itertools.product(ROWS, PLACES)]
    for part in packs:
        count += compare_bits(op(*(x[part] for x in inputs)), whole[part], str(part))
    kept = torch.arange(1200).cuda() % 7 == 3
    dirty = [torch.where(kept[:, None], x.flatten(1), torch.nan).view(x.shape) for x in inputs]
    count += compare_bits(op(*dirty)[kept], whole[kept], "next to NaN")
    for layout in (wide_rows, shifted):
        count += compare_bits(op(*map(layout, inputs)), whole, layout.__name__)
    assert count > (len(PLACES) * sum(ROWS) + 2 * 1200) * whole[0].numel()
    print(f"{count} values, none unequal")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [1, 16, 100, 128, 512, 513, 2688, 4096, 8192, 9000])
def test_rms_norm(width: int, dtype: torch.dtype) -> None:
    x, weight = randn(1200, width, dtype=dtype), 1 + 0.2 * torch.randn(width)
    check(lambda x: rms_norm(x, weight.to(x.device), EPS), x)
    check(lambda x: rms_norm(x, None, EPS), x)
    wide = rms_norm(x, weight.cuda(), EPS, dtype=torch.float32)
    count = compare_bits(wide.to(dtype), rms_norm(x, weight.cuda(), EPS), "one rounding")
    odd = shifted(weight.cuda())
    count += compare_bits(rms_norm(x, odd, EPS, dtype=torch.float32), wide, "the weight's address")
    print(f"{count} values, none unequal")


def test_rms_norm_of_heads_and_of_its_weight() -> None:
    """[T, H, D] within a wider projection; and the weight's gradient."""
    check(lambda x: rms_norm(x, None, EPS), randn(1200, 4, 128, dtype=torch.bfloat16))
    memory = randn(300, 10, 128, dtype=torch.bfloat16)
    x = memory[:, 2:6]
    compare_bits(rms_norm(x, None, EPS), rms_norm(x.contiguous(), None, EPS), "a view")
    grads = []
    for device in ("cpu", "cuda"):
        weight = torch.linspace(0.5, 2, 128, device=device).requires_grad_()
        rms_norm(x.to(device), weight, EPS).float().square().sum().backward()
        grads.append(weight.grad)
    torch.testing.assert_close(grads[1].cpu(), grads[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "groups"), [(56, 8), (128, 1), (96, 2), (4096, 8)], ids=str)
def test_gated_norm(width: int, groups: int, dtype: torch.dtype) -> None:
    x, gate = randn(1200, width, dtype=dtype), randn(1200, width, dtype=dtype)
    weight = 1 + 0.2 * torch.randn(width)
    check(lambda x, z: gated_norm(x, z, weight.to(x.device), EPS, groups=groups), x, gate)
    both = randn(1200, 3 * width, dtype=dtype)
    z, part = both[:, :width], both[:, width : 2 * width]
    got = gated_norm(part, z, weight.cuda(), EPS, groups=groups)
    want = gated_norm(part.clone(), z.clone(), weight.cuda(), EPS, groups=groups)
    print(f"{compare_bits(got, want, 'views')} values, none unequal")


@pytest.mark.parametrize("width", [1, 8, 128, 700, 2048])
def test_elementwise(width: int) -> None:
    x = 2 * randn(1200, width)
    for op in (sigmoid, silu, softplus, sqrt_softplus, relu2):
        check(op, x)
    check(lambda x: silu(x, torch.bfloat16), x)
    compare_bits(silu(x, torch.bfloat16), silu(x).bfloat16(), "one rounding")
    for dtype in DTYPES:
        check(relu2, x.to(dtype))
        for limit in (None, 3.0):
            check(lambda g, u, limit=limit: swiglu(g, u, limit), x.to(dtype), x.flip(0).to(dtype))
    assert sigmoid(x.double()).dtype == torch.float64


def test_far_out_and_not_a_number() -> None:
    far = torch.tensor([-1e4, -104.0, -88.0, -16.6, -1e-6, 0.0, 19.99, 20.01, 88.0, 1e4, torch.inf])
    for op in (sigmoid, silu, softplus, sqrt_softplus, relu2):
        torch.testing.assert_close(op(far.cuda()).cpu(), op(far), rtol=2e-5, atol=1e-18)
        assert bool(op(torch.full((5,), torch.nan).cuda()).isnan().all())
    nan, one = torch.full((5,), torch.nan).cuda(), torch.ones(5).cuda()
    assert bool(swiglu(nan, one, 1.0).isnan().all() and swiglu(one, nan, 1.0).isnan().all())
