"""The CUDA backend's products and sums: right by a tolerance, and one row's bits whatever stands beside it."""

import itertools

import pytest
import torch
from rich.table import Table
from torch import Tensor

from tests.ops.conftest import _make_weight as make_weight
from tests.ops.conftest import compare_bits
from unified_models.bench import products
from unified_models.formats.weights import FORMATS
from unified_models.ops.grouped_linear import grouped_linear
from unified_models.ops.linear import arithmetic, linear, narrow
from unified_models.ops.linear.arithmetic import tiled_mm
from unified_models.ops.linear.probe import probe
from unified_models.ops.products import bmm
from unified_models.ops.sums import add_rows_, row_mean, row_sum, running_sum

ROWS = (1, 2, 3, 7, 8, 16, 17, 31, 32, 33, 64, 100, 128, 200, 256, 1000, 2048, 3000)
PLACES = (0, 5, 1095)
BYTES = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 1000, 4096)
"""Rows for DeepGEMM's products of bytes, which take blocks of 16 to 256 rows."""
CORES = 5e-5
"""Tensor cores cut the lowest bits of what they add; measured 1.3e-5 over 4096 channels (2026-11, H200)."""


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).cuda()


def codes(*shape: int) -> Tensor:
    """e4m3, from the smallest to the largest alike."""
    bytes_ = torch.randint(0, 256, shape, dtype=torch.uint8)
    bytes_[bytes_ & 0x7F == 0x7F] = 0  # NaN
    return bytes_.view(torch.float8_e4m3fn).cuda()


def packs(x: Tensor) -> list[slice]:
    return [slice(p, p + n) for n, p in itertools.product(ROWS, PLACES) if p + n <= len(x)]


def close(got: Tensor, want: Tensor, off: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), want, rtol=off, atol=off)


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


@pytest.mark.parametrize(("K", "N"), [(64, 16), (128, 128), (720, 48), (4096, 2048), (2688, 10304)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_a_row_of_a_narrow_product_has_one_value(K: int, N: int, dtype: torch.dtype) -> None:
    """Whatever the tile, the rows beside it, their number, and the columns."""
    from unified_models.ops.linear import narrow_triton

    x = randn(4096, K).bfloat16()
    w = codes(N, K) if dtype == torch.float8_e4m3fn else randn(N, K).bfloat16()
    whole, want = narrow.product(x, w), x.double() @ w.double().T
    close(whole / want.std(), want / want.std(), CORES)
    count = sum(compare_bits(narrow.product(x[p], w), whole[p], str(p)) for p in packs(x))
    wide = dtype == torch.bfloat16
    for _, tile in (
        (*narrow_triton.TILES, (None, narrow_triton.FEWER)) if wide else narrow_triton.E4M3_TILES
    ):
        count += compare_bits(narrow_triton.product(x, w, tile=tile), whole, str(tile))
    count += compare_bits(narrow.product(x, w[:16]), whole[:, :16].contiguous(), "columns")
    dirty = torch.where(torch.arange(4096).cuda()[:, None] % 7 == 3, x, torch.nan)
    count += compare_bits(narrow.product(dirty, w)[3::7], whole[3::7], "next to NaN")
    count += compare_bits(narrow.product(torch.cat((x, x), 1)[:, :K], w), whole, "strided")
    odd = torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)
    count += compare_bits(narrow.product(odd, w), whole, "at an odd address")
    assert count > 2 * sum(ROWS) * N
    print(f"{count} values, none unequal")


@pytest.mark.parametrize(("K", "N"), [(4096, 4096), (2688, 10304), (4096, 129280), (1024, 1024)])
def test_deep_gemm_has_the_bits_of_triton(K: int, N: int) -> None:
    """At any number of rows; the head's shape and Nemotron's among them."""
    from unified_models.ops.linear import narrow_triton

    if narrow.deep_gemm_release() is None:
        pytest.skip("no DeepGEMM, or no Hopper GPU")
    x, w = randn(3000, K).bfloat16(), randn(N, K).bfloat16()
    assert narrow.large(w)
    whole = narrow_triton.product(x, w)
    count = 0
    for rows in ROWS:
        count += compare_bits(narrow.product(x[-rows:], w), whole[-rows:], str(rows))
        rounded = narrow.product(x[-rows:], w, torch.bfloat16)
        count += compare_bits(rounded, whole[-rows:].bfloat16(), f"{rows}, rounded")
    assert count == 2 * sum(ROWS) * N
    print(f"{count} values, none unequal")


@pytest.mark.parametrize(
    ("N", "K", "groups"), [(1024, 4096, 1), (8192, 1024, 1), (1024, 4096, 8)], ids=str
)
@torch.no_grad()
def test_a_row_of_deep_gemms_product_of_bytes_has_one_value(N: int, K: int, groups: int) -> None:
    """Block FP8: for any number of rows, at any place, next to NaN and in a graph; and near the CPU's and Triton's."""
    if narrow.deep_gemm_release() is None:
        pytest.skip("no DeepGEMM, or no Hopper GPU")
    weight = make_weight(torch.randn(groups * N, K), "fp8_ue8m0", groups=groups)
    x = torch.randn(max(BYTES) + max(PLACES), *((groups,) if groups > 1 else ()), K).bfloat16()
    few = linear(x[:9], weight(), dtype=torch.float32)[0].double() / K**0.5
    x, reading = x.cuda(), weight.cuda()()
    assert arithmetic.inputs(x, [reading])[0].bytes
    (whole,), (float32,) = linear(x, reading), linear(x, reading, dtype=torch.float32)
    for got, want in ((whole[:9].cpu(), few), (whole, float32.double() / K**0.5)):
        torch.testing.assert_close(got.double() / K**0.5, want, rtol=2**-7, atol=5e-3)
    count = 0
    for rows, place in itertools.product(BYTES, PLACES):
        part = slice(place, place + rows)
        count += compare_bits(linear(x[part], reading)[0], whole[part], str(part))
    assert count == len(PLACES) * sum(BYTES) * N * groups
    dirty = x.clone()
    dirty[torch.arange(len(x)) % 7 != 3] = torch.nan
    count += compare_bits(linear(dirty, reading)[0][3::7], whole[3::7], "next to NaN")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (recorded,) = linear(x[:33], reading)
    recorded.zero_()
    graph.replay()
    count += compare_bits(recorded, whole[:33], "a graph")
    unlike = int((float32.bfloat16() != whole).sum())
    print(f"{count} values, none unequal; {unlike} of {whole.numel()} unlike Triton's, rounded")


@pytest.mark.parametrize("shape", [(4096,), (1024,), (8, 4096), (3, 130)], ids=str)
def test_scales_with_the_tokens_beside_each_other(shape: tuple[int, ...]) -> None:
    """The bytes of the row-major form, for DeepGEMM."""
    from unified_models.ops.quantize_triton import quantize_rows

    x, count = randn(max(BYTES), *shape).bfloat16(), 0
    want = quantize_rows(x)
    for rows in BYTES:
        codes, scales = quantize_rows(x[-rows:], torch.float8_e4m3fn, tokens_last=True)
        assert scales.stride(0) == 1 and scales.stride(-1) == -(-rows // 4) * 4
        count += compare_bits(codes.bfloat16(), want[0][-rows:], f"{rows} rows")
        count += compare_bits(scales.contiguous(), want[1][-rows:], f"{rows} rows")
    print(f"{count} values, none unequal")


def test_bench_of_products() -> None:
    """Its own gate passes, and it has a row for each provider and number of rows."""
    table = Table()
    for header in range(6):
        table.add_column(str(header))
    assert products.measure(1024, 1024, table)
    assert table.row_count == len(products.ROWS) * len(products.providers())


@pytest.mark.parametrize(("B", "N"), [(1, 16), (3, 129), (32, 2048)])
def test_a_row_of_a_scaled_product_has_one_value(B: int, N: int) -> None:
    from unified_models.ops.linear import narrow_triton

    """Codes of every size, so that their sums are rounded."""
    x, w = (codes(rows, 128 * B) for rows in (4096, N))
    x, xs, ws = x.bfloat16(), torch.rand(4096, B).cuda(), torch.rand(N, B).cuda()
    whole = narrow.scaled_product(x, xs, w, ws)
    values = [t.double() * s.double().repeat_interleave(128, 1) for t, s in ((x, xs), (w, ws))]
    want = values[0] @ values[1].T
    close(whole / want.std(), want / want.std(), CORES)
    count = sum(
        compare_bits(narrow.scaled_product(x[p], xs[p], w, ws), whole[p], str(p)) for p in packs(x)
    )
    for _, tile in narrow_triton.E4M3_TILES:
        count += compare_bits(
            narrow_triton.scaled_product(x, xs, w, ws, tile=tile), whole, str(tile)
        )
    assert count > 2 * sum(ROWS) * N
    print(f"{count} values, none unequal")


@pytest.mark.parametrize("name", FORMATS)
def test_a_linear_is_that_of_the_cpu(name: str) -> None:
    """Every format, with groups, and a stack of experts: float32 sums in another order, and one rounding."""
    for shape, groups in (((160, 384), 1), ((256, 384), 2), ((3, 48, 384), 1)):
        weight = make_weight(torch.randn(shape), name, groups=groups)
        x = torch.randn(40, *((groups,) if groups > 1 else ()), 384).bfloat16()
        outs = []
        for device in ("cpu", "cuda"):
            reading, rows = weight.to(device)(), x.to(device)
            stack = len(shape) == 3
            (y,) = grouped_linear(rows, (7, 0, 33), reading) if stack else linear(rows, reading)
            outs.append(y.detach().cpu().double())
        assert outs[0].abs().mean() > 0
        torch.testing.assert_close(outs[1], outs[0], rtol=2**-7, atol=1e-3)


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
