"""Which token a logprob is about: field cases of index maps, packs and counts, named in the tests."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import unified_models as um
from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.engine import Output, Sampling
from unified_models.verify import against_training, bits, require_equal


def by_hand(toy: Any, tokens: list[int]) -> Tensor:
    """Entry i scores token i + 1, from the row of token i, one at a time."""
    rows = [torch.log_softmax(toy.table.master.detach()[a], -1)[b] for a, b in pairwise(tokens)]
    return torch.stack(rows)


@pytest.mark.parametrize("length", [3, 1], ids=["response3", "response1"])
def test_a03_entry_i_scores_token_i(toy: Any, length: int) -> None:
    prompt, response = [3, 14, 1, 5, 9], [2, 6, 11][:length]
    expected = by_hand(toy, prompt + response)
    assert len(set(expected.tolist())) == len(expected), "values by which a shift would show"
    (trained,) = um.logprobs(toy, [prompt + response])
    assert require_equal(trained.detach(), expected) == 4 + length
    (scored,) = um.Engine(toy).score([prompt + response])
    assert require_equal(scored, expected) == 4 + length

    out = Output(response, expected[4:], [0] * length, "length")
    assert against_training(toy, [prompt], [out]).bits.unequal == 0
    assert against_training(toy, [prompt], [out]).bits.compared == length


@pytest.mark.parametrize("shift", [-1, 1])
def test_a03_the_harness_sees_a_shift(toy: Any, shift: int) -> None:
    prompt, response = [3, 14, 1, 5, 9], [2, 6, 11]
    values = by_hand(toy, [*prompt, *response, 7])[4 + shift :][:3]
    told = against_training(toy, [prompt], [Output(response, values, [0] * 3, "length")])
    assert told.bits.unequal == 3
    assert told.gap.max > 0.01


@pytest.mark.parametrize("counts", [(4, 3, 4), (3, 4, 3), (4, 4, 3), (0, 1, 1)])
def test_a04_counts_must_agree(toy: Any, counts: tuple[int, int, int]) -> None:
    ids, logprobs, versions = counts
    out = Output([1] * ids, torch.zeros(logprobs), [0] * versions, "length")
    with pytest.raises(
        ValueError, match=f"output 0: {ids} ids, {logprobs} logprobs and {versions} versions"
    ):
        against_training(toy, [[2]], [out])


def test_a04_as_many_outputs_as_prompts(toy: Any) -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 outputs"):
        against_training(toy, [[1], [2]], [Output([1], torch.zeros(1), [0], "length")])


def test_versions_are_not_mixed(toy: Any) -> None:
    values = by_hand(toy, [1, 2, 3])
    values[0] += 1  # sampled under other weights
    out = Output([2, 3], values, [0, 1], "length")
    with pytest.raises(ValueError, match=r"2 weight versions \[0, 1\]"):
        against_training(toy, [[1]], [out])
    told = against_training(toy, [[1]], [out], version=1)
    assert (told.bits.compared, told.bits.unequal, told.gap.valid) == (1, 0, 1)
    assert against_training(toy, [[1]], [out], version=0).bits.unequal == 1


def test_a_rollout_of_a_model_equals_its_training_forward(micro: Any, draw: Any) -> None:
    prompts = draw(1, 4, 33)
    outs = um.Engine(micro).generate(prompts, Sampling(max_tokens=9, temperature=0.7))
    told = against_training(micro, prompts, outs, 0.7)
    assert (told.bits.compared, told.bits.unequal) == (27, 0)
    assert "0 of 27 unequal; valid 27, max 0" in str(told)
    assert against_training(micro, prompts, outs, 0.71).bits.unequal == 27


def test_a06_micro_batches_change_no_bit(tiny: Any, draw: Any) -> None:
    sequences = draw(5, 16, 2, 33, 9, 21)
    alone = [um.logprobs(tiny, [s])[0] for s in sequences]
    pairs = [lp for i in range(0, 6, 2) for lp in um.logprobs(tiny, sequences[i : i + 2])]
    packed = um.logprobs(tiny, sequences)
    backwards = um.logprobs(tiny, sequences[::-1])[::-1]
    for other in (pairs, packed, backwards):
        assert require_equal(alone, other) == sum(map(len, sequences)) - 6


@torch.no_grad()
@pytest.mark.parametrize("apart", [False, True], ids=["one_sequence", "neighbours"])
def test_a10_row_0_of_2_and_of_17_tokens(tiny: Any, draw: Any, apart: bool) -> None:
    """Every logit of the row: a result near zero is a failure."""
    (ids,) = draw(17)

    def row(count: int) -> Tensor:
        ctx = LocalContext(Step.of([1] * count if apart else [count]))
        return tiny.logits(tiny(torch.tensor(ids[:count]), ctx), ctx)[0]  # type: ignore[no-any-return]

    assert require_equal(row(2), row(17)) == 512


def test_f05_packed_documents_equal_themselves_alone(tiny: Any, draw: Any) -> None:
    documents = draw(100, 200)
    alone = [um.logprobs(tiny, [d])[0] for d in documents]
    assert require_equal(um.logprobs(tiny, documents), alone) == 298


def test_f06_no_document_scores_the_next(micro: Any) -> None:
    """A0 A1 A2 B0 B1: two logprobs and one; B's first token is not scored, and A does not depend on it."""
    a, b = [5, 6, 7], [8, 9]
    values = um.logprobs(micro, [a, b])
    assert [len(v) for v in values] == [2, 1]
    other = um.logprobs(micro, [a, [10, 9]])
    assert require_equal(values[0], other[0]) == 2
    assert bits(values[1], other[1]).unequal == 1
