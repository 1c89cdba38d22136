"""grouped_linear: each row is what linear gives it with its expert's matrix, whoever else comes along."""

import math

import pytest
import torch
from torch import Tensor

from unified_models.formats.activations import dequantized_rows
from unified_models.ops.grouped_linear import grouped_linear
from unified_models.ops.grouped_linear.reference import grouped_linear as reference
from unified_models.ops.linear import linear
from unified_models.ops.linear.reference import straight_through
from unified_models.weight import Reading

FORMATS = [
    ("bfloat16", 100, 40),
    ("float32", 33, 7),
    ("fp8_ue8m0", 300, 130),
    ("fp8_float32", 200, 24),
    ("mxfp4", 96, 40),
    ("fp8_tensor", 100, 40),
    ("nvfp4", 112, 33),
    ("nvfp4_four_over_six", 48, 24),
]
IDS = [f"{name}-{k}x{n}" for name, k, n in FORMATS]
COUNTS = (3, 0, 17, 1, 0)


def values(experts: int, k: int, n: int) -> Tensor:
    return torch.randn(experts, n, k) / math.sqrt(k)


def seen_by(reading: Reading, x_PK: Tensor, counts_E: tuple[int, ...]) -> Tensor:
    """What the products see instead of x; a static quantisation, with each expert's own scale, is written out here."""
    if reading.format.input == "dynamic":
        return dequantized_rows(x_PK)
    if reading.format.input == "plain":
        return x_PK
    scales = reading.weight.input_scale.master.detach()
    assert len(set(scales.tolist())) == len(counts_E)
    parts = [
        (part.float() * (1 / s)).clamp(-448, 448).to(torch.float8_e4m3fn).double() * s.double()
        for part, s in zip(x_PK.split(counts_E), scales, strict=True)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("name", "k", "n"), FORMATS, ids=IDS)
def test_grouped_linear_and_backward(check_gradients, make_weight, name, k, n, dtype) -> None:
    weight = make_weight(values(len(COUNTS), k, n), name)
    x = torch.randn(sum(COUNTS), k).to(dtype).requires_grad_()
    reading = weight()
    seen = seen_by(reading, x.detach(), COUNTS)
    check_gradients(
        lambda: grouped_linear(x, COUNTS, reading),
        lambda x, w: reference(
            straight_through(x, seen), COUNTS, straight_through(w, reading.dequantized())
        ),
        {"x": x, "w": weight.master},
        terms=k,
    )


def test_reference_gradient_by_finite_differences() -> None:
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    w = torch.randn(3, 2, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, w: reference(x, (1, 0, 3), w), (x, w))


@pytest.mark.parametrize(("name", "k", "n"), FORMATS, ids=IDS)
def test_rows_are_those_of_linear(make_weight, same_bits, name, k, n) -> None:
    w, x = values(len(COUNTS), k, n), torch.randn(sum(COUNTS), k)
    stack = make_weight(w, name)
    (got,) = grouped_linear(x, COUNTS, stack())
    count = start = 0
    for e, rows in enumerate(COUNTS):
        part = slice(start, start + rows)
        single = make_weight(w[e], name)
        if stack.input_scale is not None:
            single.input_scale.assign(stack.input_scale.master.detach()[e])
        (alone,) = linear(x[part], single())
        count += same_bits(got[part], alone, f"expert {e}", empty=rows == 0)
        start += rows
    assert count == got.numel() > 0


@pytest.mark.parametrize(("name", "k", "n"), FORMATS, ids=IDS)
def test_rows_keep_their_bits(check_rows, make_weight, name, k, n) -> None:
    """Rows of two experts by turns: a pack sorts them, as a router's caller does, and puts them back."""
    reading = make_weight(values(2, k, n), name)()
    experts = torch.randint(0, 2, (150,))

    def sorted_rows(x: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort(stable=True)
        counts = torch.bincount(expert, minlength=2).tolist()
        out = torch.empty(len(x), n, dtype=reading.format.activation)
        out[order] = grouped_linear(x[order], counts, reading)[0]
        return out

    assert check_rows(sorted_rows, torch.randn(150, k), experts) > 0


@pytest.mark.parametrize("name", ["bfloat16", "fp8_ue8m0", "mxfp4", "fp8_tensor", "nvfp4"])
def test_first_row_for_any_number_of_rows_B09(make_weight, same_bits, name: str) -> None:
    """The same row first, of M = 1, 16, 32, 64, 1024 on its expert, and alone on its expert beside a crowd."""
    reading = make_weight(values(3, 64, 24), name)()
    x = torch.randn(1024, 64).bfloat16()
    alone = grouped_linear(x[:1], (0, 1, 0), reading)[0]
    count = 0
    for size in (16, 32, 64, 1024):
        together = grouped_linear(x[:size], (0, size, 0), reading)[0]
        count += same_bits(together[:1], alone, f"{size} rows")
    crowd = torch.cat((x[1:301], x[:1], x[301:]))
    count += same_bits(grouped_linear(crowd, (300, 1, 723), reading)[0][300:301], alone, "alone")
    assert count == 5 * 24


def test_idle_experts_and_backward_F10(make_weight) -> None:
    """All rows to expert 0 of 8, and a single row: the idle experts' gradients are zero, not None."""
    for rows in (5, 1):
        for name in ("mxfp4", "fp8_tensor", "nvfp4"):
            weight = make_weight(values(8, 32, 16), name)
            x = torch.randn(rows, 32, requires_grad=True)
            grouped_linear(x, (rows, *[0] * 7), weight())[0].float().square().sum().backward()
            assert bool((weight.master.grad[1:] == 0).all())
            assert bool((weight.master.grad[0] != 0).any())


def test_no_rows_at_all_and_backward(make_weight) -> None:
    weight = make_weight(values(2, 32, 16))
    x = torch.zeros(0, 32, requires_grad=True)
    (y,) = grouped_linear(x, (0, 0), weight())
    assert y.shape == (0, 16)
    y.sum().backward()
    assert torch.equal(weight.master.grad, torch.zeros(2, 16, 32))


def test_counts_must_add_up(make_weight) -> None:
    reading = make_weight(values(2, 32, 16))()
    with pytest.raises(AssertionError, match="3 rows counted, 4 given"):
        grouped_linear(torch.zeros(4, 32), (1, 2), reading)


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((5, 16, 128), 100), ((4, 16, 128), 128), ((6, 16, 128), 128), ((16, 128), 128)],
    ids=["narrow rows", "fewer experts", "more experts", "one matrix"],
)
def test_what_does_not_fit_is_refused(make_weight, shape, channels) -> None:
    """FP8 rows are zero-filled to 128 channels, so narrow ones would be multiplied without a word."""
    weight = make_weight(torch.randn(shape), "fp8_ue8m0")
    with pytest.raises(
        ValueError, match=rf"5 experts and rows of {channels} channels .*{shape[0]}, "
    ):
        grouped_linear(torch.randn(sum(COUNTS), channels), COUNTS, weight())


@pytest.mark.parametrize(("name", "k", "n"), FORMATS, ids=IDS)
def test_counts_as_a_tensor_and_backward(make_weight, same_bits, name, k, n) -> None:
    """The same rows and gradients as for numbers."""
    weight, x = make_weight(values(len(COUNTS), k, n), name), torch.randn(sum(COUNTS), k)
    found = []
    for counts in (COUNTS, torch.tensor(COUNTS)):
        rows = x.clone().requires_grad_()
        (y,) = grouped_linear(rows, counts, weight())
        found.append((y, *torch.autograd.grad(y.float().square().sum(), (rows, weight.master))))
    assert same_bits(*found, "a tensor of counts") > x.numel()
