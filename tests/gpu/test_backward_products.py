"""Gradients by kernels on a GPU against float64: products of linears and experts, norms, activations, convolution.

A product may be off by FLOAT of its sum's deviation, the root of its terms' squares, or by CUT of it for each term
where there are many (tensor cores cut the lowest bits of what they add), and by one rounding to its dtype.
"""

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import _make_weight as make_weight
from tests.ops.conftest import compare_bits, nothing_waits
from tests.ops.triton_local_backward_child import compare, whole
from unified_models.formats.weights import FORMATS
from unified_models.ops.activation import reference as activations
from unified_models.ops.activation import relu2, silu, swiglu
from unified_models.ops.combine import combine_sorted, spread
from unified_models.ops.combine.reference import combine
from unified_models.ops.conv.pack import conv_pack
from unified_models.ops.gated_norm import gated_norm
from unified_models.ops.gated_norm.reference import gated_norm as gated_norm_reference
from unified_models.ops.grouped_linear import backward_triton as experts
from unified_models.ops.grouped_linear import grouped_linear
from unified_models.ops.grouped_linear.triton import RowTiles
from unified_models.ops.linear import backward_triton as kernels
from unified_models.ops.linear import gradients, linear, narrow
from unified_models.ops.pages import Sequences
from unified_models.ops.rms_norm import rms_norm
from unified_models.ops.rms_norm.reference import rms_norm as rms_norm_reference
from unified_models.ops.sort import by_expert
from unified_models.weight import Reading

FLOAT = 1e-4
CUT = 2**-24 / 16
"""16 terms are added at once, and half of the sum's last bit is lost on average, always towards zero."""
BF, F32 = torch.bfloat16, torch.float32
COUNTS = ((1, 0, 1, 3), (40, 7, 0, 200), (0, 0, 2500, 9), (0, 1, 0, 0), (16, 32, 64, 128))


def randn(*shape: int, dtype: torch.dtype = F32) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def assert_product(got: Tensor, a: Tensor, b: Tensor, name: str) -> int:
    """got is a @ b."""
    a, b = a.double(), b.double()
    want, deviation = a @ b, (a.square() @ b.square()).sqrt()
    own = torch.finfo(got.dtype).eps / 2
    error = (got.double() - want).abs() - own * want.abs()
    most = max(FLOAT, CUT * a.shape[1])
    assert bool((error <= most * deviation + 1e-30).all()), (
        f"{name}: {float((error / deviation.clamp_min(1e-30)).max()):.3g} of a deviation"
    )
    return got.numel()


def weight(name: str, *shape: int, **options: int) -> Reading:
    found: Reading = make_weight(torch.randn(shape) / shape[-1] ** 0.5, name, **options).cuda()()
    return found


def twice(name: str, outs: Tensor, leaves: tuple[Tensor, ...], dy: Tensor) -> tuple[Tensor, ...]:
    """Gradients, which must be the same again."""
    first = torch.autograd.grad(outs, leaves, dy, retain_graph=True)
    again = torch.autograd.grad(outs, leaves, dy)
    compare_bits(again, first, name)
    return first


@pytest.mark.parametrize("deep", [False, True], ids=["Triton", "installed"])
@pytest.mark.parametrize("dtype", [BF, F32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_linear(monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype, deep: bool) -> None:
    """x in `dtype`, and y in the format's dtype and in float32; sizes with and without DeepGEMM."""
    if not deep:
        monkeypatch.setattr(narrow, "deep_gemm_release", lambda: None)
    count = 0
    for (N, K), rows in (((2048, 1024), (1, 17, 1000, 3001)), ((720, 544), (5, 300))):
        reading = weight(name, N, K)
        for T in rows:
            x = randn(T, K, dtype=dtype).requires_grad_()
            for out in (None, F32):
                (y,) = linear(x, reading, dtype=out)
                dy = randn(T, N, dtype=y.dtype)
                dx, dw = twice(name, y, (x, reading.master), dy)
                assert (dx.dtype, dw.dtype) == (dtype, F32)
                count += assert_product(dx, dy, reading.dequantized(), f"dX of {T} rows")
                count += assert_product(dw, dy.T, reading.seen(x.detach()), f"dW of {T} rows")
    assert count > 0
    print(f"{count} values")


def test_a_heads_gradient_is_rounded() -> None:
    """To bfloat16, before both products; that of a smaller matrix is not."""
    for N, rounded in ((131072, True), (4096, False)):
        reading, x = weight("bfloat16", N, 1024), randn(64, 1024, dtype=BF).requires_grad_()
        (y,) = linear(x, reading, dtype=F32)
        dy = randn(64, N)
        dx, dw = torch.autograd.grad(y, (x, reading.master), dy)
        if rounded:
            dy = dy.bfloat16()
        assert_product(dx, dy, reading.dequantized(), "dX")
        assert_product(dw, dy.T, reading.seen(x.detach()), "dW")


@pytest.mark.parametrize("name", ["bfloat16", "fp8_ue8m0", "fp8_tensor"])
def test_groups(name: str) -> None:
    for N in (256, 80):
        reading, x = weight(name, 4 * N, 512, groups=4), randn(300, 4, 512, dtype=BF)
        x.requires_grad_()
        (y,) = linear(x, reading)
        dy = randn(*y.shape, dtype=y.dtype)
        dx, dw = twice(name, y, (x, reading.master), dy)
        w, seen = reading.dequantized().unflatten(0, (4, N)), reading.seen(x.detach())
        for g in range(4):
            assert_product(dx[:, g], dy[:, g], w[g], f"dX of group {g}")
            assert_product(dw[g * N : (g + 1) * N], dy[:, g].T, seen[:, g], f"dW of group {g}")


@pytest.mark.parametrize("dtype", [BF, F32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_experts(name: str, dtype: torch.dtype) -> None:
    """Nothing waits; an expert without rows has zeros."""
    N, K = 720, 1024
    reading, count = weight(name, 4, N, K), 0
    w = reading.dequantized()
    for counts in COUNTS:
        P, numbers = sum(counts), torch.tensor(counts).cuda()
        x = randn(P, K, dtype=dtype).requires_grad_()
        (y,) = grouped_linear(x, numbers, reading)
        dy = randn(P, N, dtype=y.dtype)
        dx, dw = twice(name, y, (x, reading.master), dy)
        (y,) = grouped_linear(x, numbers, reading)
        with nothing_waits():
            again = torch.autograd.grad(y, (x, reading.master), dy)
        compare_bits(again, (dx, dw), "without a wait")
        start = 0
        for e, each in enumerate(counts):
            span = slice(start, start + each)
            seen = reading.seen(x.detach()[span], e)
            assert_product(dx[span], dy[span], w[e], f"dX of expert {e}, {counts}")
            assert_product(dw[e], dy[span].T, seen, f"dW of expert {e}, {counts}")
            assert each or bool((dw[e] == 0).all())
            start += each
        count += dx.numel() + dw.numel()
    print(f"{count} values")


def test_many_rows_of_many_experts() -> None:
    """98,304 rows of 128 experts of 1856 x 2688, skewed: every tenth expert against float64, and another tile."""
    E, N, K, P = 128, 1856, 2688, 98304
    ids = (torch.rand(P, device="cuda").square() * E).long().clamp(max=E - 1)
    counts = torch.bincount(ids, minlength=E)
    ends = counts.cumsum(0).tolist()
    x, dy, w = randn(P, K, dtype=BF), randn(P, N, dtype=BF), randn(E, N, K, dtype=BF)
    tiles, count = RowTiles(counts, P), 0
    dx = experts.dgrad(dy, w, K, tiles, BF)
    dw = experts.wgrad(dy, x, tiles, F32)
    for e in range(0, E, 10):
        span = slice(ends[e - 1] if e else 0, ends[e])
        count += assert_product(dx[span], dy[span], w[e], f"dX of expert {e}")
        count += assert_product(dw[e], dy[span].T, x[span], f"dW of expert {e}")
    other = (64, 128, 64, 4, 4)
    compare_bits(experts.dgrad(dy, w, K, tiles, BF, tile=other), dx, "another tile")
    del dx
    compare_bits(experts.wgrad(dy, x, tiles, F32, tile=other), dw, "another tile")
    assert count > 0


def test_long_sums_go_in_parts() -> None:
    """A router's dW: 12 parts of 16,384 rows, of a gradient in float32 and in bfloat16."""
    x = randn(16384, 2688, dtype=BF)
    for dtype in (BF, F32):
        dy = randn(16384, 128, dtype=dtype)
        first = kernels.wgrad(dy, x, F32)
        assert_product(first, dy.T, x, str(dtype))
        compare_bits(kernels.wgrad(dy, x, F32), first, "again")
    assert not gradients.by_deep_gemm(dy, x, first, F32)


def test_logits_keep_a_float32_gradient() -> None:
    """Control: with dY rounded to bfloat16 the bound is missed."""
    reading, x = weight("bfloat16", 20000, 2688), randn(700, 2688, dtype=BF).requires_grad_()
    (y,) = linear(x, reading, dtype=F32)
    dy = randn(*y.shape)
    (dw,) = torch.autograd.grad(y, reading.master, dy)
    assert_product(dw, dy.T, x.detach(), "dW")
    with pytest.raises(AssertionError, match="of a deviation"):
        assert_product(kernels.wgrad(dy.bfloat16(), x.detach(), F32), dy.T, x.detach(), "dW")


@pytest.mark.parametrize("dtype", [BF, F32], ids=str)
def test_norms(dtype: torch.dtype) -> None:
    for R, N in ((1, 2688), (3000, 2688), (700, 4096), (33, 100)):
        x, gate, dy = (randn(R, N, dtype=dtype).requires_grad_() for _ in range(3))
        dy, w = dy.detach(), torch.rand(N, device="cuda").add_(0.5).requires_grad_()
        got = twice("norm", rms_norm(x, w, 1e-5), (x, w), dy)
        compare(got, lambda x, w: rms_norm_reference(x, w, 1e-5), (x.detach(), w.detach()), dy)
        got = twice("gated norm", gated_norm(x, gate, w, 1e-5, groups=4), (x, gate, w), dy)
        leaves = (x.detach(), gate.detach(), w.detach())
        compare(got, lambda *a: gated_norm_reference(*a, 1e-5, 4), leaves, dy, dtype == BF)


@pytest.mark.parametrize("dtype", [BF, F32], ids=str)
def test_activations(dtype: torch.dtype) -> None:
    for R, N in ((1, 7), (3000, 1856), (33, 100)):
        x, up, dy = (randn(R, N, dtype=dtype) * 3 for _ in range(3))
        for leaf in (x, up):
            leaf.requires_grad_()
        got = twice("relu2", relu2(x), (x,), dy)
        compare(got, activations.relu2, (x.detach(),), dy)
        got = twice("swiglu", swiglu(x, up, 2.0), (x, up), dy)
        leaves = (x.detach(), up.detach())
        compare(got, lambda g, u: activations.swiglu(g, u, 2.0), leaves, dy)
        wide = x.detach().float().requires_grad_()
        got = twice("silu", silu(wide, dtype), (wide,), dy)
        compare(got, torch.nn.functional.silu, (wide.detach(),), dy)


def test_convolution_of_a_pack() -> None:
    lengths, C, K = (1, 3000, 2, 700), 6144, 4
    T, S = sum(lengths), len(lengths)
    of = torch.arange(S).repeat_interleave(torch.tensor(lengths)).int().cuda()
    total = torch.tensor(lengths).int().cuda()
    starts = torch.cat((total.new_zeros(1), total.cumsum(0).int()))
    position = torch.arange(T).cuda().int() - starts[of.long()]
    who = Sequences(of, position, starts, torch.zeros_like(total), total)
    for dtype in (BF, F32):
        x = randn(T, 2 * C, dtype=dtype)[:, :C].requires_grad_()
        taps, bias = randn(C, K).requires_grad_(), randn(C).requires_grad_()
        y, dy = conv_pack(x, taps, bias, starts[:-1].long(), who), randn(T, C)
        got = twice("convolution", y, (x, taps, bias), dy)
        leaves = (x.detach(), taps.detach(), bias.detach())
        compare(got, lambda *args: whole(*args, lengths), leaves, dy)


@pytest.mark.parametrize("dtype", [BF, F32], ids=str)
def test_rows_to_experts_and_back(dtype: torch.dtype) -> None:
    T, K, M, E = 1000, 6, 2688, 128
    ids = torch.rand(T, E, device="cuda").topk(K).indices
    order, place, _ = by_expert(ids, E)
    x, gates = randn(T, M, dtype=dtype).requires_grad_(), torch.rand(T, K, device="cuda")
    rows = spread(x, order, place)
    compare_bits(rows, x[order // K], "rows")
    dy = randn(T * K, M, dtype=dtype)
    got = twice("rows", rows, (x,), dy)
    compare(got, lambda x: x[order // K], (x.detach(),), dy)
    y, dout = randn(T * K, M, dtype=dtype).requires_grad_(), randn(T, M, dtype=dtype)
    gates.requires_grad_()
    got = twice("combine", combine_sorted(y, place, gates, dtype), (y, gates), dout)
    compare(got, lambda y, g: combine(y[place], g), (y.detach(), gates.detach()), dout)
