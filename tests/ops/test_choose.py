"""choose: the router's experts by one written rule, whatever the ties and whatever is not a number."""

import math

import pytest
import torch
from torch import Tensor

from unified_models.ops.choose import choose, ordered_bits
from unified_models.ops.choose.reference import choose as reference


def by_reference(scores_TE: Tensor, k: int) -> Tensor:
    return torch.tensor([reference(row, k) for row in scores_TE])


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 8), (1, 1), (33, 6), (256, 6)])
def test_choose(experts: int, k: int) -> None:
    """Random scores, scores on a coarse grid (many ties), and some NaN."""
    scores = torch.randn(60, experts)
    scores[20:40] = (2 * scores[20:40]).round()
    scores[40:, : experts - k : 3] = math.nan
    assert torch.equal(choose(scores, k), by_reference(scores, k))


@pytest.mark.parametrize("experts", [8, 33])
def test_rows_keep_their_experts(check_rows, experts: int) -> None:
    scores = (2 * torch.randn(150, experts)).round()
    assert check_rows(lambda s: choose(s, 6), scores, nan=False) > 0


def test_no_gradient_to_backward() -> None:
    scores = torch.randn(3, 8, requires_grad=True)
    assert not choose(scores, 2).requires_grad


def test_order_of_extremes() -> None:
    """inf first, -0 ties with +0, subnormals and -inf in their places, NaN of either sign never."""
    nan = torch.tensor([0x7FC00000, -0x400000], dtype=torch.int32).view(torch.float32)
    numbers = torch.tensor([-0.0, 0.0, 1e-45, -1e-45, math.inf, -math.inf, 3e38, -3e38])
    scores = torch.cat((nan, numbers))[None]
    assert choose(scores, 8).tolist() == [[6, 8, 4, 2, 3, 5, 9, 7]]
    bits = ordered_bits(numbers.sort().values)
    assert bool((bits[1:] >= bits[:-1]).all())
    assert ordered_bits(torch.tensor([-0.0])).equal(ordered_bits(torch.tensor([0.0])))


def test_ties_go_to_the_lower_expert_A14() -> None:
    """Router biases near 7 need float32: bf16 has steps of 1/32 there, and ties that this rule would decide."""
    bias = torch.linspace(6.82, 7.06, 256)[torch.randperm(256)]
    want = bias.argsort(descending=True)[:6]
    assert torch.equal(choose(bias[None], 6)[0], want)
    assert not torch.equal(choose(bias.bfloat16()[None], 6)[0], want)
    assert choose(torch.full((1, 256), 6.9), 6).tolist() == [[0, 1, 2, 3, 4, 5]]


def test_too_few_numbers_are_named() -> None:
    scores = torch.zeros(4, 8)
    scores[2, 1:] = math.nan
    with pytest.raises(ValueError, match="router scores of row 2: 1 of 8 are numbers, 2 are need"):
        choose(scores, 2)


@pytest.mark.parametrize("k", [0, 9])
def test_k_is_between_1_and_all(k: int) -> None:
    with pytest.raises(ValueError, match=f"choose {k} of 8 experts"):
        choose(torch.zeros(1, 8), k)


def test_no_tokens() -> None:
    assert choose(torch.zeros(0, 8), 2).shape == (0, 2)
