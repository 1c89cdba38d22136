"""linear: every format against the straight-through reference, and rows whose bits never move."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from unified_models import formats
from unified_models.formats.activations import dequantized_rows
from unified_models.formats.weights import FORMATS
from unified_models.ops import products
from unified_models.ops.linear import arithmetic, linear, narrow
from unified_models.ops.linear import probe as start_up
from unified_models.ops.linear.reference import linear as reference
from unified_models.ops.linear.reference import straight_through
from unified_models.weight import Reading

# format, K, N: whole blocks, and sizes that are multiples of neither 128 nor 16 (mxfp4 needs 32 along K, nvfp4 16).
SHAPES = [
    ("bfloat16", 128, 128),
    ("bfloat16", 100, 40),
    ("bfloat16", 7, 1),
    ("float32", 320, 33),
    ("float32", 1024, 24),
    ("fp8_ue8m0", 256, 128),
    ("fp8_ue8m0", 300, 130),
    ("fp8_ue8m0", 5, 3),
    ("fp8_float32", 300, 130),
    ("mxfp4", 96, 40),
    ("mxfp4", 288, 17),
    ("fp8_tensor", 256, 128),
    ("fp8_tensor", 100, 40),
    ("nvfp4", 112, 40),
    ("nvfp4", 1040, 17),
    ("nvfp4_four_over_six", 112, 33),
]
IDS = [f"{name}-{k}x{n}" for name, k, n in SHAPES]
DTYPES = [torch.bfloat16, torch.float32]


def values(k: int, n: int) -> Tensor:
    return torch.randn(n, k) / math.sqrt(k)


def seen_by(reading: Reading, x: Tensor) -> Tensor:
    """What the product sees instead of x; a static quantisation is written out here."""
    if reading.format.input == "dynamic":
        return dequantized_rows(x.detach())
    if reading.format.input == "plain":
        return x.detach()
    scale = reading.weight.input_scale.master.detach()
    codes = (x.detach().float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.double() * scale.double()


def held_by(reading: Reading) -> Tensor:
    """The weight's values; those of the formats with a float32 scale a matrix are written out here, in float64."""
    packed = reading.packed
    if reading.format.name == "fp8_tensor":
        return packed["codes"].view(torch.float8_e4m3fn).double() * packed["scale"].double()
    if not reading.format.name.startswith("nvfp4"):
        return reading.dequantized()
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    table = torch.cat((table, -table))
    low, high = packed["codes"] & 15, packed["codes"] >> 4
    values = table[torch.stack((low, high), -1).flatten(-2).long()].unflatten(-1, (-1, 16))
    scales = packed["scales"].view(torch.float8_e4m3fn).double()
    return (values * scales[..., None]).flatten(-2) * packed["global"].double()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "k", "n"), SHAPES, ids=IDS)
def test_linear_and_backward(check_gradients, make_weight, name, k, n, dtype) -> None:
    weight = make_weight(values(k, n), name)
    x = torch.randn(21, k).to(dtype).requires_grad_()
    reading = weight()
    seen, held = seen_by(reading, x), held_by(reading)
    check_gradients(
        lambda: linear(x, reading),
        lambda x, w: reference(x, w, seen, held),
        {"x": x, "w": weight.master},
        terms=k,
    )


@pytest.mark.parametrize(
    "name", ["bfloat16", "fp8_ue8m0", "fp8_float32", "mxfp4", "fp8_tensor", "nvfp4"]
)
def test_groups_and_backward(check_gradients, make_weight, name) -> None:
    """Groups of 40 rows: a 128-block of FP8 scales spans several of them."""
    groups, k, n = 3, 160, 40
    weight = make_weight(values(k, groups * n), name, groups=groups)
    x = torch.randn(19, groups, k, dtype=torch.bfloat16).requires_grad_()
    reading = weight()
    seen, held = seen_by(reading, x), held_by(reading)

    def groupwise(x: Tensor, w: Tensor) -> Tensor:
        w = straight_through(w, held).unflatten(0, (groups, n))
        parts = [reference(x[:, g], w[g], seen[:, g]) for g in range(groups)]
        return torch.stack(parts, 1)

    leaves = {"x": x, "w": weight.master}
    check_gradients(lambda: linear(x, reading), groupwise, leaves, terms=k)


def test_several_weights_backward_and_dtype(check_gradients, make_weight) -> None:
    """An FP8 and a bfloat16 weight in one call: each sees x its own way, and x gets both gradients."""
    coarse, plain = make_weight(values(200, 24), "fp8_ue8m0"), make_weight(values(200, 9))
    x = torch.randn(5, 200).requires_grad_()  # in bfloat16 each part, and their sum, is rounded
    seen, packed = dequantized_rows(x.detach()), (coarse().dequantized(), plain().dequantized())
    check_gradients(
        lambda: linear(x, coarse(), plain(), dtype=torch.float32),
        lambda x, a, b: (reference(x, a, seen, packed[0]), reference(x, b, None, packed[1])),
        {"x": x, "a": coarse.master, "b": plain.master},
        terms=400,
    )


def test_static_scales_are_each_weights_own_and_backward(check_gradients, make_weight) -> None:
    """Two FP8 weights with other input scales and a four-bit one in one call: each sees x its own way."""
    made = [make_weight(values(96, 24), name) for name in ("fp8_tensor", "fp8_tensor", "nvfp4")]
    made[1].input_scale.assign(made[0].input_scale.master.detach() * 3)
    x = torch.randn(5, 96).requires_grad_()
    readings = [w() for w in made]
    both = [(seen_by(r, x), held_by(r)) for r in readings]
    assert not torch.equal(both[0][0], both[1][0])
    check_gradients(
        lambda: linear(x, *readings, dtype=torch.float32),
        lambda x, **w: tuple(reference(x, v, *b) for v, b in zip(w.values(), both, strict=True)),
        {"x": x} | {f"w{n}": w.master for n, w in enumerate(made)},
        terms=400,
    )


def test_a_scale_of_a_matrix_multiplies_its_sum(make_weight, same_bits) -> None:
    """FP8: codes times codes over the whole K, then once the product of both scales. NVFP4: x times code * scale, then
    the global scale; each scale applied to the codes first has other bits."""
    x, count = torch.randn(7, 160), 0
    for name in ("fp8_tensor", "nvfp4", "nvfp4_four_over_six"):
        weight = make_weight(values(160, 32), name)
        reading = weight()
        if name == "fp8_tensor":
            s = weight.input_scale.master.detach()
            rows = (x * s.reciprocal()).clamp(-448, 448).to(torch.float8_e4m3fn).float()
            codes = reading.packed["codes"].view(torch.float8_e4m3fn).float()
            outer = reading.packed["scale"] * s
        else:
            rows, outer = x, reading.packed["global"]
            codes = (held_by(reading) / outer.double()).float()
        got = linear(x, reading, dtype=torch.float32)[0]
        count += same_bits(got, arithmetic.tiled_mm(rows, codes) * outer, name)
        with pytest.raises(AssertionError, match="differ"):
            same_bits(got, arithmetic.tiled_mm(rows, codes * outer), "control")
    assert count == 3 * 7 * 32


def test_four_bit_values_are_exact_in_bfloat16(make_weight) -> None:
    """A kernel may keep code * scale in bfloat16: every product of a code and an e4m3 scale is one."""
    for name in ("nvfp4", "nvfp4_four_over_six"):
        reading = make_weight(values(1024, 64), name)()
        scaled = reading.format.scaled_codes(reading.packed)
        assert torch.equal(scaled, scaled.bfloat16().float())
        assert bool((scaled != 0).any())


def test_an_input_scale_is_read_at_each_commit(make_weight) -> None:
    weight, x = make_weight(values(64, 16), "fp8_tensor"), torch.randn(3, 64)
    before = linear(x, weight(), dtype=torch.float32)[0]
    weight.input_scale.assign(weight.input_scale.master.detach() / 2)
    after = linear(x, weight(), dtype=torch.float32)[0]
    want = seen_by(weight(), x) @ held_by(weight()).T
    assert not torch.equal(before, after)
    assert torch.allclose(after.double(), want, atol=1e-5)


def test_reference_gradient_by_finite_differences() -> None:
    x, w = (torch.randn(3, 5, dtype=torch.float64, requires_grad=True) for _ in "xw")
    assert torch.autograd.gradcheck(reference, (x, w))


@pytest.mark.parametrize(("name", "k", "n"), SHAPES, ids=IDS)
def test_rows_keep_their_bits(check_rows, make_weight, name, k, n) -> None:
    reading = make_weight(values(k, n), name)()
    x = torch.randn(150, k)
    assert check_rows(lambda x: linear(x, reading), x) > 0


@pytest.mark.parametrize("name", ["bfloat16", "fp8_ue8m0"])
def test_rows_of_groups_keep_their_bits(check_rows, make_weight, name) -> None:
    reading = make_weight(values(160, 80), name, groups=2)()
    x = torch.randn(150, 2, 160, dtype=torch.bfloat16)
    assert check_rows(lambda x: linear(x, reading, dtype=torch.float32), x) > 0


@pytest.mark.parametrize("name", ["bfloat16", "fp8_ue8m0", "fp8_float32", "mxfp4"])
def test_columns_do_not_depend_on_the_others(make_weight, same_bits, name) -> None:
    """16-row slices of w, cut at any row of a plain weight and at block edges of a quantised one."""
    w, x = values(256, 384), torch.randn(33, 256, dtype=torch.bfloat16)
    whole, count = linear(x, make_weight(w, name)())[0], 0
    for part in (slice(0, 128), slice(128, 384), slice(256, 272)):
        alone = linear(x, make_weight(w[part], name)())[0]
        if part.stop % 128 == 0:
            count += same_bits(alone, whole[:, part], f"columns {part}")
    assert count > 0


def test_products_of_fp8_blocks_are_added_in_order(make_weight, same_bits) -> None:
    """The written order: per 128-block, the product of codes times (x scale * w scale), blocks from the first on."""
    reading = make_weight(values(384, 32), "fp8_float32")()
    x = torch.randn(4, 384)
    rows, w = arithmetic.prepare(x, reading), reading.operand(arithmetic.operand)
    total = torch.zeros(4, 32)
    for b in range(3):
        dots = arithmetic.tiled_mm(rows.x[:, 128 * b : 128 * (b + 1)], w.w[0, b])
        total = total + dots * (rows.scales[:, b, None] * w.scales[0, b])
    assert same_bits(linear(x, reading, dtype=torch.float32)[0], total, "blocks in order") == 128


BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("name", "shape", "groups", "dtype", "taken"),
    [
        ("fp8_ue8m0", (1024, 1024), 1, BF16, True),
        ("fp8_float32", (512, 4096), 1, BF16, True),
        ("fp8_ue8m0", (8 * 1024, 4096), 8, BF16, True),
        ("fp8_ue8m0", (8 * 256, 1024), 8, BF16, False),  # a group is small, the whole is not
        ("fp8_ue8m0", (1024, 896), 1, BF16, False),
        ("fp8_ue8m0", (1088, 1024), 1, BF16, False),  # half a block of rows
        ("fp8_ue8m0", (1024, 1088), 1, BF16, False),
        ("fp8_ue8m0", (1024, 1024), 1, torch.float32, False),
        ("fp8_ue8m0", (4, 2048, 4096), 1, BF16, False),  # experts
        *[(name, (2048, 4096), 1, BF16, name.startswith("fp8_")) for name in FORMATS],
    ],
)
def test_deep_gemm_takes_a_weight_by_its_shape(
    monkeypatch: pytest.MonkeyPatch, name, shape, groups, dtype, taken: bool
) -> None:
    """x is not asked; and nothing is taken where DeepGEMM is not installed, or the weight lies on a CPU."""
    taken = taken and name != "fp8_tensor"
    reading = SimpleNamespace(
        format=formats.find(name),
        shape=torch.Size(shape),
        weight=SimpleNamespace(groups=groups),
        packed={"codes": SimpleNamespace(is_cuda=True)},
    )
    monkeypatch.setattr(narrow, "deep_gemm_release", lambda: "0.0")
    assert narrow.takes_bytes(reading, dtype) is taken
    reading.packed["codes"].is_cuda = False
    assert not narrow.takes_bytes(reading, dtype)
    reading.packed["codes"].is_cuda = True
    monkeypatch.setattr(narrow, "deep_gemm_release", lambda: None)
    assert not narrow.takes_bytes(reading, dtype)


def test_a_weight_that_deep_gemm_would_take_on_a_cpu(monkeypatch, make_weight, same_bits) -> None:
    reading, x = make_weight(values(1024, 1024), "fp8_ue8m0")(), torch.randn(5, 1024).bfloat16()
    (want,) = linear(x, reading)
    monkeypatch.setattr(narrow, "deep_gemm_release", lambda: "0.0")
    (rows,) = arithmetic.inputs(x, [reading])
    assert not rows.bytes
    assert same_bits(linear(x, reading)[0], want, "with DeepGEMM") == 5 * 1024


def test_x_is_prepared_once_for_each_way_of_multiplying(monkeypatch, make_weight) -> None:
    """A weight that DeepGEMM takes is another kind than one of the same format that it does not take."""
    many, few = (make_weight(values(128, n), "fp8_ue8m0")() for n in (256, 128))
    made: list[tuple[int, bool]] = []

    def prepare(x: Tensor, reading: Reading, counts_E: None, as_bytes: bool) -> arithmetic.Input:
        made.append((reading.shape[0], as_bytes))
        return arithmetic.Input(x, None)

    monkeypatch.setattr(arithmetic, "prepare", prepare)
    monkeypatch.setattr(narrow, "takes_bytes", lambda r, dtype: len(r.packed["codes"]) == 256)
    found = arithmetic.inputs(torch.randn(3, 128), [many, few, many, few])
    assert made == [(256, True), (128, False)]
    assert found[0] is found[2] and found[1] is found[3] and found[0] is not found[1]


@pytest.mark.parametrize("threads", [2, 3, 8])
@pytest.mark.parametrize("k", [384, 1024, 2688])
def test_threads_do_not_share_a_sum(same_bits, k: int, threads: int) -> None:
    """One tile, and one product of a stack, where there are more threads than that: MKL would cut K between them
    (on AVX-512, at K 1024 and 2 threads, nine values in ten of a single tile)."""
    x, w = torch.randn(400, k), torch.randn(64, k)
    tiles, count = x.view(25, 16, k), 0
    whole, stack = arithmetic.tiled_mm(x, w), products.bmm(tiles, w.T.expand(25, -1, -1))
    torch.set_num_threads(threads)
    for rows in (1, 16, 17, 48, 112):
        count += same_bits(arithmetic.tiled_mm(x[:rows], w), whole[:rows], f"{rows} rows")
    for n in (1, 2, 7):
        got = products.bmm(tiles[:n], w.T.expand(n, -1, -1))
        count += same_bits(got, stack[:n], f"{n} products")
    assert count > 0
    assert products.bmm(tiles[:0], w.T.expand(0, -1, -1)).shape == (0, 16, 64)


def test_no_rows_and_backward(make_weight) -> None:
    weight = make_weight(values(64, 8))
    x = torch.zeros(0, 64, dtype=torch.bfloat16, requires_grad=True)
    (y,) = linear(x, weight())
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad.shape == (0, 64)
    assert torch.equal(weight.master.grad, torch.zeros(8, 64))


def test_saturated_values_pass_their_gradient_F18(make_weight) -> None:
    """A value of its block's largest size has no clipped gradient: q is the identity in the backward. With a
    power-of-two scale nothing exceeds 448; a hand-made scale shows the clip."""
    x = torch.full((1, 128), 3.0)
    x[0, 0] = 1000.0
    x.requires_grad_()
    weight = make_weight(torch.ones(16, 128), "fp8_ue8m0")
    (y,) = linear(x, weight(), dtype=torch.float32)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((1, 128), 16.0))
    static = make_weight(torch.ones(16, 128), "fp8_tensor")
    static.input_scale.assign(torch.tensor(0.01))  # 1000 counts as 4.48, and has a gradient
    x.grad = None
    (y,) = linear(x, static(), dtype=torch.float32)
    y.sum().backward()
    assert abs(float(y.detach()[0, 0]) - (127 * 2.88 + 4.48)) < 1e-2  # 300 is code 288
    assert torch.allclose(x.grad, torch.full((1, 128), 16.0))
    weight.get_buffer("scales").fill_(
        120
    )  # 2^-7 where 2^-8 is needed: the forward now reads another value
    (y,) = linear(x.detach(), weight(), dtype=torch.float32)
    y.sum().backward()
    assert bool((weight.master.grad == weight.master.grad[0]).all())


def test_zero_blocks_stay_zero_C15(make_weight) -> None:
    """256x256 zeros with one non-zero tile, and a row of zeros: no NaN, zeros where zeros are."""
    w = torch.zeros(256, 256)
    w[128:, 128:] = torch.randn(128, 128)
    x = torch.randn(3, 256)
    x[1] = 0
    for name in ("fp8_ue8m0", "fp8_float32", "mxfp4", "fp8_tensor", "nvfp4"):
        (y,) = linear(x, make_weight(w, name)(), dtype=torch.float32)
        assert bool(y.isfinite().all())
        assert bool((y[:, :128] == 0).all() and (y[1] == 0).all())
        assert bool((y[[0, 2], 128:] != 0).all())


def test_channels_must_agree(make_weight) -> None:
    weight = make_weight(values(64, 8))
    weight.label = "blocks.0.wq"
    with pytest.raises(ValueError, match=r"blocks\.0\.wq: x has 63 channels, the weight 64"):
        linear(torch.zeros(2, 63), weight())


def test_groups_must_agree(make_weight) -> None:
    weight = make_weight(values(64, 8), groups=2)
    weight.label = "wo_a"
    for shape in ((2, 3, 64), (2, 64)):
        told = rf"wo_a: x has rows of shape \({shape[1]}.*\), the weight takes \(2, 64\)"
        with pytest.raises(ValueError, match=told):
            linear(torch.zeros(shape), weight())


def test_one_group_either_way(make_weight, same_bits) -> None:
    """[T, 1, K] of a weight that is one group, as [T, K]: the same bits, forward and backward."""
    weight, x = make_weight(values(64, 8)), torch.randn(5, 64)
    flat, grouped = x.clone().requires_grad_(), x[:, None].clone().requires_grad_()
    (want,), (got,) = linear(flat, weight()), linear(grouped, weight())
    assert got.shape == (5, 1, 8)
    assert same_bits(got[:, 0], want, "one group") == 40
    dy = torch.randn(5, 8).to(want.dtype)
    want.backward(dy)
    got.backward(dy[:, None])
    assert same_bits(grouped.grad[:, 0], flat.grad, "its gradient") == 5 * 64


def test_a_stack_of_matrices_is_refused(make_weight) -> None:
    stack = make_weight(torch.zeros(3, 8, 64))
    with pytest.raises(ValueError, match=r"takes a matrix, got a weight of shape \(3, 8, 64\)"):
        linear(torch.zeros(2, 64), stack())


def test_probe_passes_here_and_names_what_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    start_up.probe.cache_clear()
    start_up.probe("cpu")
    start_up.probe.cache_clear()
    monkeypatch.setattr(start_up, "tiled_mm", lambda x, w: x @ w.T)
    with pytest.raises(RuntimeError, match=r"not row-invariant .* rows \(K 128, N 128\)"):
        start_up.probe("cpu")
    assert torch.get_num_threads() == 1
    monkeypatch.undo()
    start_up.probe.cache_clear()
    start_up.probe("cpu")
