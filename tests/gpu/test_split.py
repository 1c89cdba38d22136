"""float32 products by parts of K on a GPU: right by a tolerance, and one row's bits whatever stands beside it."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import _make_weight as make_weight
from tests.ops.conftest import compare_bits, nothing_waits, shifted, wide_rows
from unified_models.ops.linear import linear, narrow
from unified_models.ops.products import bmm

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 1000)
PLACES = (0, 5, 95)
TOKENS = 1100
SHAPES = ((16384, 24), (16384, 4), (4096, 256), (2688, 128), (2050, 33))
"""K, N: DeepSeek-V4's hyper-connections, routers' gates, and one that nothing divides."""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).cuda()


def close(got: Tensor, want: Tensor, off: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want, rtol=off, atol=off)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("K", "N"), SHAPES)
def test_a_row_has_one_value(K: int, N: int, dtype: torch.dtype) -> None:
    """For any number of rows, at any place, next to NaN, wherever it lies, in turns and beside fewer columns."""
    from unified_models.ops.linear import split_triton

    x, w = randn(TOKENS, K).to(dtype), randn(N, K)
    whole = narrow.product(x, w)
    close(whole / K**0.5, x.double() @ w.double().T / K**0.5)
    count = 0
    for rows, place in itertools.product(ROWS, PLACES):
        part = slice(place, place + rows)
        count += compare_bits(narrow.product(x[part], w), whole[part], str(part))
    assert count == len(PLACES) * sum(ROWS) * N
    dirty = x.clone()
    dirty[torch.arange(TOKENS) % 7 != 3] = torch.nan
    count += compare_bits(narrow.product(dirty, w)[3::7], whole[3::7], "next to NaN")
    for layout in (wide_rows, shifted):
        count += compare_bits(narrow.product(layout(x), layout(w)), whole, layout.__name__)
    count += compare_bits(narrow.product(x, w[:3]), whole[:, :3].contiguous(), "columns")
    for memory in (1, 1 << 20):
        turns = split_triton.product(x, w, memory=memory)
        count += compare_bits(turns, whole, f"in turns of {memory} bytes")
    count += compare_bits(narrow.product(x.float(), w), whole, "as float32")
    rounded = narrow.product(x, w, torch.bfloat16)
    count += compare_bits(rounded, whole.bfloat16(), "rounded once")
    print(f"{count} values, none unequal")


@pytest.mark.parametrize("T", [1, 40])
def test_k_alone_chooses(T: int) -> None:
    """Below LONG the product is that of `products_triton`, from it on that of parts: of other bits."""
    from unified_models.ops.linear import split_triton

    count = 0
    for K in (split_triton.LONG - 16, split_triton.LONG):
        x, w = randn(T, K), randn(24, K)
        got, parts, one = narrow.product(x, w), split_triton.product(x, w), bmm(x[None], w.T[None])
        count += compare_bits(got, parts if K == split_triton.LONG else one[0], f"K {K}")
        assert not torch.equal(parts, one[0]), "the two orders of sums have the same bits"
    assert count == 2 * T * 24
    print(f"{count} values, none unequal")


def test_parts_are_added_in_their_order() -> None:
    """First to last from zero: of parts that are products of their own."""
    from unified_models.ops.linear import split_triton

    x, w = randn(33, 4096), randn(24, 4096)
    pairs = zip(x.split(split_triton.PART, 1), w.split(split_triton.PART, 1), strict=True)
    parts = [split_triton.product(a, b) for a, b in pairs]
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    count = compare_bits(narrow.product(x, w), total, "parts in their order")
    backwards = torch.zeros_like(total)
    for part in reversed(parts):
        backwards = backwards + part
    assert not torch.equal(backwards, total), "the order of parts shows nowhere"
    print(f"{count} values, none unequal")


def test_a_linear_is_that_of_the_cpu() -> None:
    """Of a float32 weight: values and gradients; nothing waits, and a graph has the same bits."""
    weight, x = make_weight(torch.randn(24, 4096), "float32"), torch.randn(40, 4096)
    given = torch.randn(40, 24)
    found = []
    for device in ("cpu", "cuda"):
        reading, rows = weight.to(device)(), x.to(device).requires_grad_()
        (y,) = linear(rows, reading)
        (dx,) = torch.autograd.grad(y, rows, given.to(device))
        found.append((y.detach().cpu() / 64, dx.cpu()))
    for got, want in zip(found[1], found[0], strict=True):
        close(got, want.double(), 2e-5)
    reading, rows = weight.cuda()(), x.cuda()
    with torch.no_grad():
        (want,) = linear(rows, reading)
        with nothing_waits():
            (again,) = linear(rows, reading)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            (recorded,) = linear(rows, reading)
        recorded.zero_()
        graph.replay()
    count = compare_bits(again, want, "again") + compare_bits(recorded, want, "a graph")
    assert count == 2 * 40 * 24
    print(f"{count} values, none unequal")
