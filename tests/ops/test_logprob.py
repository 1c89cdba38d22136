"""logprob: log_softmax(logits / T) of one whole row in float32, then the element."""

import math
from functools import partial

import pytest
import torch
from torch import Tensor

from unified_models.ops.logprob import PROVIDERS, log_softmax, logprobs
from unified_models.ops.logprob.reference import logprobs as reference


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("vocabulary", [3, 33, 512, 1001, 2500])
def test_logprobs_and_backward(check_gradients, vocabulary: int, provider: str) -> None:
    logits = (4 * torch.randn(9, vocabulary)).requires_grad_()
    temperature_T = torch.rand(9) + 0.3
    ids_T = torch.randint(0, vocabulary, (9,))
    check_gradients(
        lambda: logprobs(logits, temperature_T, ids_T, provider=provider),
        lambda logits: reference(logits, temperature_T.double(), ids_T),
        {"logits": logits},
        terms=16,
    )


def test_reference_gradient_by_finite_differences() -> None:
    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    temperature_T, ids_T = torch.tensor([1.0, 0.7, 2.0]).double(), torch.tensor([0, 4, 2])
    assert torch.autograd.gradcheck(lambda x: reference(x, temperature_T, ids_T), (logits,))


@pytest.mark.parametrize("provider", PROVIDERS)
@pytest.mark.parametrize("vocabulary", [17, 512, 1001, 2500])
def test_rows_keep_their_bits(check_rows, vocabulary: int, provider: str) -> None:
    logits, temperature_T = 4 * torch.randn(150, vocabulary), torch.rand(150) + 0.3
    assert check_rows(partial(log_softmax, provider=provider), logits, temperature_T) > 0
    ids_T = torch.randint(0, vocabulary, (150,))
    assert check_rows(partial(logprobs, provider=provider), logits, temperature_T, ids_T) > 0


def test_the_providers_are_two() -> None:
    """Other orders, other bits: a trainer has to know which of them sampled."""
    logits, ones = 4 * torch.randn(200, 2500), torch.ones(200)
    one, two = (log_softmax(logits, ones, provider=provider) for provider in PROVIDERS)
    assert (one != two).any() and (one - two).abs().max() < 1e-5
    with pytest.raises(ValueError, match="'v2'; known: torch_row, vllm_v2"):
        log_softmax(logits, ones, provider="v2")


def by_hand(logits: list[float], temperature: float, i: int) -> float:
    """Python numbers only."""
    x = [v / temperature for v in logits]
    top = max(x)
    return x[i] - top - math.log(math.fsum(math.exp(v - top) for v in x))


def test_temperature_divides_the_logits_A01() -> None:
    """T = 0.7 is part of the definition: log_softmax(logits / T), not log_softmax(logits)."""
    logits = 3 * torch.randn(4, 50)
    ids_T = torch.tensor([0, 9, 33, 49])
    got = logprobs(logits, torch.full((4,), 0.7), ids_T)
    t = torch.tensor(0.7).item()
    want = [by_hand(row, t, i) for row, i in zip(logits.tolist(), ids_T.tolist(), strict=True)]
    assert got.tolist() == pytest.approx(want, abs=2e-6)
    assert (got - logprobs(logits, torch.ones(4), ids_T)).abs().min() > 1e-3


@pytest.mark.parametrize("provider", PROVIDERS)
def test_nothing_is_divided_by_1(same_bits, provider: str) -> None:
    """No temperatures are temperatures of 1, forward and backward, bit by bit."""
    ids_T, found = torch.randint(0, 1001, (40,)), []
    logits = 4 * torch.randn(40, 1001)
    for temperature_T in (None, torch.ones(40)):
        leaf = logits.clone().requires_grad_()
        lps = logprobs(leaf, temperature_T, ids_T, provider=provider)
        lps.square().sum().backward()
        found.append((lps.detach(), leaf.grad))
    assert same_bits(*found, "T = 1") == 40 + 40 * 1001


def test_division_in_float32_A13(same_bits) -> None:
    """T = 0.6 and logits near 30: upcast, then divide by a float32 tensor. A bf16 quotient would be off by 0.1."""
    logits = (30 + torch.randn(64, 40)).bfloat16()
    temperature_T = torch.full((64,), 0.6)
    got = log_softmax(logits.float(), temperature_T)
    want = torch.log_softmax(logits.float() / torch.tensor(0.6), -1)
    assert same_bits(got, want, "T = 0.6") == 64 * 40
    in_bf16 = torch.log_softmax((logits / 0.6).float(), -1)
    assert (got - in_bf16).abs().max() > 0.02


def test_sharp_rows_and_backward_A05() -> None:
    """A logit gap of 200: the logprob is 0, or -200, and nothing is NaN."""
    logits = torch.zeros(2, 8)
    logits[:, 3] = 200.0
    logits.requires_grad_()
    got = logprobs(logits, torch.ones(2), torch.tensor([3, 4]))
    assert got.tolist() == [0.0, -200.0]
    got.sum().backward()
    assert bool(logits.grad.isfinite().all())


@pytest.mark.parametrize("rows", [1, 7, 256], ids=lambda n: f"rows{n}")
def test_chunks_of_rows_F08(same_bits, rows: int) -> None:
    """300 rows of a vocabulary of 12928: in chunks of rows the bits are those of the full matrix."""
    logits, temperature_T = 4 * torch.randn(300, 12928), torch.rand(300) + 0.3
    ids_T = torch.randint(0, 12928, (300,))
    whole = logprobs(logits, temperature_T, ids_T)
    split = (t.split(rows) for t in (logits, temperature_T, ids_T))
    parts: list[Tensor] = [logprobs(*chunk) for chunk in zip(*split, strict=True)]
    assert same_bits(torch.cat(parts), whole, f"chunks of {rows}") == 300
