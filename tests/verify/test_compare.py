"""Comparisons see every bit, count what they compared, and are not content with nothing. Names begin with the row of
the field cases that a test answers."""

import math

import pytest
import torch

from unified_models.verify import Comparison, UnequalError, bits, gap, require_equal

NAN = float("nan")
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_finds_the_first_difference(dtype: torch.dtype) -> None:
    a = torch.arange(12).view(3, 4).to(dtype)
    b = a.clone()
    assert bits(a, b) == Comparison(12, 0, None, a.element_size())
    b[1, 2], b[2, 0] = 100, 101
    found = bits(a, b)
    assert (found.compared, found.unequal) == (12, 2)
    assert found.first is not None
    assert found.first[0] == (1, 2)


def test_bits_are_patterns() -> None:
    a = torch.tensor([1.0, 0.0, NAN, -1.0])
    quiet = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = bits(a, torch.tensor([1.0, -0.0, NAN, -1.0]))
    assert found == Comparison(4, 1, ((1,), 0, 0x80000000))
    assert str(found) == "1 of 4 unequal, first at [1]: 0x00000000 and 0x80000000"
    assert bits(a[2:3], a[2:3]).unequal == 0
    assert bits(a[2:3], quiet).first == ((0,), 0x7FC00000, 0x7FC00001)
    one = torch.ones(1, dtype=torch.bfloat16)
    assert str(bits(one, -one)) == "1 of 1 unequal, first at [0]: 0x3f80 and 0xbf80"


def test_bits_of_lists() -> None:
    a = [torch.zeros(2), torch.zeros(0), torch.ones(3)]
    b = [torch.zeros(2), torch.zeros(0), torch.tensor([1.0, 1.0, 2.0])]
    assert bits(a, a) == Comparison(5, 0)
    assert bits(a, b).first == ((2, 2), 0x3F800000, 0x40000000)
    assert bits([], []) == Comparison(0, 0)
    assert bits(torch.tensor(1.0), torch.tensor(2.0)).first == ((), 0x3F800000, 0x40000000)


def test_bits_of_strided_views_and_scalars_on_a_graph() -> None:
    a = torch.arange(6.0).view(2, 3)
    assert bits(a.t(), a.t().contiguous()).compared == 6
    assert bits(a.clone().requires_grad_(), a).unequal == 0


@pytest.mark.parametrize(
    ("a", "b", "said"),
    [
        (torch.zeros(2), torch.zeros(3), r"\(2,\) and b \(3,\)"),
        (torch.zeros(2, 1), torch.zeros(2), r"\(2, 1\) and b \(2,\)"),
        (torch.zeros(2), torch.zeros(2).double(), "float32 and b torch.float64"),
        ([torch.zeros(2)], [torch.zeros(2)] * 2, "1 tensors and b 2"),
        (
            [torch.zeros(2), torch.zeros(2)],
            [torch.zeros(2), torch.zeros(4)],
            r"tensor 1: .*\(2,\) and b \(4,\)",
        ),
        ([torch.zeros(2)], torch.zeros(2), "list and b a Tensor"),
    ],
)
def test_bits_refuses_what_does_not_match(a: object, b: object, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        bits(a, b)  # type: ignore[arg-type]


def test_f13_masked_positions_do_not_count() -> None:
    a = torch.tensor([-1.0, -300.0, -math.inf, NAN, -2.0])
    b = torch.tensor([-1.0, -100.0, -1.0, -1.0, -2.0])
    mask = torch.tensor([True, False, False, False, True])
    assert bits(a, b, mask) == Comparison(2, 0)
    assert bits(a, b).unequal == 3
    told = gap(a, b, mask)
    assert (told.valid, told.max, told.mean, told.std, told.k3) == (2, 0.0, 0.0, 0.0, 0.0)
    for nothing in (gap(a, b, torch.zeros(5, dtype=torch.bool)), gap([], [])):
        assert (nothing.valid, nothing.max, nothing.k3) == (0, 0.0, 0.0)
    with pytest.raises(UnequalError, match="nothing was compared"):
        require_equal(a, b, mask=torch.zeros(5, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"mask is torch\.int64"):
        bits(a, b, mask.long())


def test_gap_against_the_formulas() -> None:
    a, b = -torch.rand(50, dtype=torch.float64), -torch.rand(50, dtype=torch.float64)
    told = gap(a, b)
    apart = (a.exp() - b.exp()).abs()
    assert told.valid == 50
    assert told.max == apart.max()
    assert told.mean == apart.mean()
    assert told.std == pytest.approx(float(((apart - apart.mean()) ** 2).mean().sqrt()))
    assert told.k3 == pytest.approx(float(((b - a).exp() - (b - a) - 1).mean()))
    assert told.k3 > 0
    assert gap(a, a).max == gap(a, a).k3 == 0
    with pytest.raises(ValueError, match="50 logprobs and b 49"):
        gap(a, b[1:])


def test_a38_the_gap_is_blind_where_bits_are_not() -> None:
    """A unit in the last place of a logprob near p = 1."""
    a = torch.full((100,), -1e-3)
    b = (a.view(torch.int32) + 1).view(torch.float32)
    assert gap(a, b).max < 1e-9
    assert bits(a, b).unequal == 100


def test_a38_a_full_row_sees_what_one_token_does_not() -> None:
    """One logit of a token that was not sampled, deep in the tail: the sampled token's logprob stays."""
    logits = torch.zeros(4, 512)
    logits[:, 7], logits[:, 500] = 30.0, -40.0
    other = logits.clone()
    other[2, 500] -= 1
    rows, others = torch.log_softmax(logits, -1), torch.log_softmax(other, -1)
    assert bits(rows[:, 7], others[:, 7]).unequal == 0
    found = bits(rows, others)
    assert found.unequal == 1
    assert found.first is not None
    assert found.first[0] == (2, 500)


def test_a38_comparing_nothing_is_a_failure() -> None:
    with pytest.raises(UnequalError, match=r"scores: nothing was compared \(0 elements\)"):
        require_equal([torch.zeros(0)], [torch.zeros(0)], "scores")
    assert require_equal(torch.ones(3), torch.ones(3)) == 3
    with pytest.raises(UnequalError, match="scores: 1 of 2 unequal, first at"):
        require_equal(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), "scores")
