"""The CUDA backend's products and sums: right by a tolerance, and one row's bits whatever stands beside it."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import compare_bits
from unified_models.ops.linear.arithmetic import tiled_mm
from unified_models.ops.linear.probe import probe
from unified_models.ops.products import bmm
from unified_models.ops.sums import add_rows_, row_mean, row_sum, running_sum

ROWS = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 100, 128, 200, 256, 1000, 2048, 3000)
PLACES = (0, 5, 1095)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).cuda()


def packs(x: Tensor) -> list[slice]:
    return [slice(p, p + n) for n, p in itertools.product(ROWS, PLACES) if p + n <= len(x)]


def close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("K", "N"), [(64, 16), (128, 128), (700, 48), (4096, 2048)])
def test_a_row_of_a_product_has_one_value(K: int, N: int) -> None:
    x, w = randn(4096, K), randn(N, K)
    whole = tiled_mm(x, w)
    close(whole / K**0.5, x.double() @ w.double().T / K**0.5)
    count = sum(compare_bits(tiled_mm(x[part], w), whole[part], str(part)) for part in packs(x))
    count += compare_bits(tiled_mm(x, w[:16]), whole[:, :16].contiguous(), "columns")
    dirty = torch.where(torch.arange(4096).cuda()[:, None] % 7 == 3, x, torch.nan)
    count += compare_bits(tiled_mm(dirty, w)[3::7], whole[3::7], "next to NaN")
    wide = torch.cat((x, x), 1)[:, :K]
    count += compare_bits(tiled_mm(wide, w), whole, "strided")
    print(f"{count} values, none unequal")


@pytest.mark.parametrize("transposed", [False, True])
def test_a_product_of_a_stack_has_one_value(transposed: bool) -> None:
    a, b = randn(3000, 16, 64), randn(3000, 48, 64)
    b = b.transpose(1, 2) if transposed else b.transpose(1, 2).contiguous()
    whole = bmm(a, b)
    close(whole / 8, a.double() @ b.double() / 8)
    count = sum(compare_bits(bmm(a[p], b[p]), whole[p], str(p)) for p in packs(a))
    count += compare_bits(bmm(a[:, 3:4], b), whole[:, 3:4].contiguous(), "one row of each")
    print(f"{count} values, none unequal")


def test_more_products_than_a_grid_holds() -> None:
    a, b = randn(70_000, 1, 16), randn(70_000, 16, 16)
    compare_bits(bmm(a, b)[-3:], bmm(a[-3:], b[-3:]), "the last")


@pytest.mark.parametrize("N", [1, 6, 64, 700, 4096, 5000])
@pytest.mark.parametrize("op", [row_sum, row_mean, running_sum])
def test_a_sum_has_one_value(op, N: int) -> None:
    x = randn(4096, N)
    whole = op(x)
    wide = x.double()
    wanted = wide.cumsum(-1) if op is running_sum else wide.sum(-1, keepdim=True)
    close(whole / N**0.5, (wanted / N if op is row_mean else wanted) / N**0.5)
    count = sum(compare_bits(op(x[part]), whole[part], str(part)) for part in packs(x))
    shifted = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    count += compare_bits(op(shifted), whole, "at an odd address")
    print(f"{count} values, none unequal")


def test_gradients_of_products_and_sums() -> None:
    a, b, x = (t.requires_grad_() for t in (randn(5, 16, 64), randn(5, 64, 48), randn(7, 100)))
    wide = [t.detach().double().requires_grad_() for t in (a, b, x)]
    weights = randn(7, 100)
    loss = bmm(a, b).square().sum() + (running_sum(x) * weights).sum() + row_sum(x).square().sum()
    other = (wide[0] @ wide[1]).square().sum() + (wide[2].cumsum(-1) * weights).sum()
    grads = torch.autograd.grad(loss, (a, b, x))
    wanted = torch.autograd.grad(other + wide[2].sum(-1).square().sum(), wide)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-3)


def test_rows_are_added_in_their_order() -> None:
    index = torch.randint(0, 9, (5000,)).cuda()
    rows = randn(5000, 64)
    first = add_rows_(rows.new_zeros(9, 64), index, rows)
    for _ in range(20):
        compare_bits(add_rows_(rows.new_zeros(9, 64), index, rows), first, "again")
    close(first, rows.new_zeros(9, 64).double().index_add_(0, index, rows.double()))


def test_the_probe_passes_and_finds_a_broken_product(monkeypatch: pytest.MonkeyPatch) -> None:
    from unified_models.ops.linear import probe as start_up

    probe("cuda")
    monkeypatch.setattr(start_up, "tiled_mm", lambda x, w: (x + len(x) * 1e-6) @ w.T)
    with pytest.raises(RuntimeError, match="not row-invariant on cuda"):
        probe.__wrapped__("cuda")
