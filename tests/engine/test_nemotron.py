"""Nemotron-H in the engine: no schedule changes a bit of what is sampled.

Four small models: chunks of 16 and of 128 tokens, in bf16 and with FP8, NVFP4 and FP8 caches mixed; everything is
compared with the training forward over the whole sequence. Test names end with the row of the field cases.
"""

from typing import Any

import pytest
import torch

import unified_models as um
from unified_models.context import State

SAMPLING = um.Sampling(max_tokens=18, temperature=0.8, seed=11)


SCHEDULES: dict[str, dict[str, Any]] = {
    "one_step": {"step_tokens": 4096},
    "step7": {"step_tokens": 7, "max_sequences": 3},
    "step16_page4": {"step_tokens": 16, "page_tokens": 4},
    "one_slot": {"state_slots": 1, "step_tokens": 33},
    "two_slots_no_prefix": {"state_slots": 2, "prefix_cache": False},
    "tight": {"cache_tokens": 144},
    "tight_no_prefix": {"cache_tokens": 144, "prefix_cache": False, "step_tokens": 50},
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_decode_prefill_training_A08_A09_B11(
    hybrid: Any, bits: Any, options: dict[str, Any]
) -> None:
    given = hybrid.prompts(1, 119, 40, 17)
    engine = hybrid.engine(**options)
    outs = engine.generate(given, SAMPLING)
    compared = hybrid.check(given, outs, 0.8)
    assert [out.ids for out in outs] == [
        out.ids for out in um.Engine(hybrid.model).generate(given, SAMPLING)
    ]
    if "cache_tokens" in options:
        assert engine.stats.preemptions > 0 and engine.stats.tokens_recomputed > 0
    scored = engine.score([p + out.ids for p, out in zip(given, outs, strict=True)], 0.8)
    for prompt, out, got in zip(given, outs, scored, strict=True):
        compared += bits(got[len(prompt) - 1 :], out.logprobs)
    assert compared == 2 * 4 * 18
    assert hybrid.idle(engine)


def test_one_ulp_and_a_wrong_state_are_seen(hybrid: Any, bits: Any) -> None:
    """The control: one ulp of one logprob; and states that are wrong by a bf16 ulp while a request runs."""
    given = hybrid.prompts(150)
    engine = hybrid.engine()
    outs = engine.generate(given, SAMPLING)
    assert hybrid.check(given, outs, 0.8) == 18
    outs[0].logprobs.view(torch.int32)[7] += 1
    with pytest.raises(AssertionError, match="1 of 18 differ"):
        hybrid.check(given, outs, 0.8)
    engine = hybrid.engine(prefix_cache=False)
    request = engine.submit(given[0], SAMPLING)
    while len(request.logprobs) < 4:
        engine.step()
    for store in engine._memory.states.values():
        store.data_PX *= 1 + 2**-7
    engine.run()
    with pytest.raises(AssertionError, match="differ"):
        hybrid.check(given, [request.output()], 0.8)


def test_the_same_batch_four_times_B02(hybrid: Any, bits: Any) -> None:
    """8 prompts in the same order; nothing is left in memory in between, but for the last call."""
    given = hybrid.prompts(30, 17, 129, 5, 64, 16, 100, 33)
    engine, runs = hybrid.engine(), []
    for again in range(4):
        runs.append(engine.generate(given, SAMPLING))
        if again < 2:
            engine._memory.forget()
    assert hybrid.check(given, runs[0], 0.8) == 8 * 18
    for run in runs[1:]:
        assert [out.ids for out in run] == [out.ids for out in runs[0]]
        pairs = zip(run, runs[0], strict=True)
        assert sum(bits(a.logprobs, b.logprobs) for a, b in pairs) == 8 * 18
    assert engine.stats.prefix_hits > 0


@pytest.mark.parametrize("budget", [64, 100, 128, 1000])
def test_any_budget_beside_another_request_B03(hybrid: Any, budget: int) -> None:
    """A prompt of 300 tokens arrives while another request is decoding."""
    given = hybrid.prompts(21, 300)
    engine = hybrid.engine(step_tokens=budget)
    first = engine.submit(given[0], um.Sampling(max_tokens=14, seed=1))
    for _ in range(3):
        engine.step()
    second = engine.submit(given[1], um.Sampling(max_tokens=6, seed=2), 1)
    engine.run()
    assert hybrid.check(given, [first.output(), second.output()]) == 20
    assert engine.stats.mixed_steps > 0


def test_nine_hundred_tokens_in_pieces_A09(hybrid: Any, bits: Any) -> None:
    """At once, in pieces of 100, and in pieces one longer than the chunk."""
    (sequence,) = hybrid.prompts(900)
    Q = hybrid.Q
    with torch.no_grad():
        (expected,) = um.logprobs(hybrid.model, [sequence])
    for step_tokens in (1000, 100, Q + 1):
        engine = hybrid.engine(step_tokens=step_tokens, prefix_cache=False)
        assert bits(engine.score([sequence])[0], expected) == 899


@pytest.mark.slow
def test_nine_hundred_tokens_one_by_one_A09(hybrid_of: Any, bits: Any) -> None:
    hybrid = hybrid_of(128, True)
    (sequence,) = hybrid.prompts(900)
    with torch.no_grad():
        (expected,) = um.logprobs(hybrid.model, [sequence])
    assert bits(hybrid.engine(step_tokens=1).score([sequence])[0], expected) == 899


@pytest.mark.parametrize("budget", [5, 16])
def test_steps_smaller_than_a_chunk_D09(hybrid: Any, budget: int) -> None:
    """A prompt of 200 tokens, at most 16 a step; then once more from the prefix that such steps left."""
    Q, given = hybrid.Q, hybrid.prompts(200)
    engine = hybrid.engine(step_tokens=budget)
    for _ in range(2):
        assert hybrid.check(given, engine.generate(given, um.Sampling(max_tokens=3))) == 3
    assert engine.stats.prefix_hits == 199 // Q * Q


def test_two_hundred_steps_D01(hybrid_of: Any, bits: Any) -> None:
    """States that forget slowly are kept in float32: the last of 200 sampled tokens still has the bits of training,
    and the state in memory is that of a prefill."""
    hybrid = hybrid_of(16, False)
    for layer in (0, 2):
        hybrid.model.blocks[layer].mixer.A_log.assign(torch.full((8,), -6.0))
    given = hybrid.prompts(10)
    engine = hybrid.engine()
    outs = engine.generate(given, um.Sampling(max_tokens=200))
    assert hybrid.check(given, outs) == 200
    prefilled = hybrid.engine(step_tokens=4096)
    prefilled.score([[*given[0], *outs[0].ids]])
    states = [slot for slot in hybrid.model.slots().values() if isinstance(slot, State)]
    assert len(states) == 2
    for slot in states:
        a, b = (e._memory.states[slot] for e in (engine, prefilled))
        assert a.data_PX.dtype == torch.float32
        for chunk in range(13):
            (i,), (j,) = (
                ((s.held_P2[:, 0] == 16 * chunk) & (s.held_P2[:, 1] == 16)).nonzero()[0]
                for s in (a, b)
            )
            assert bits(a.data_PX[i], b.data_PX[j]) == slot.size


def test_the_second_half_of_a_sequence_F03(hybrid_of: Any, bits: Any) -> None:
    """2048 tokens in halves: the second begins at 1024 and reads the taps and the state that the first left; so would
    a second rank. Beside it an empty and a new document, which begin at 0."""
    hybrid = hybrid_of(128, False)
    documents = [hybrid.prompts(2048)[0], *hybrid.prompts(0, 3, 1100)[1:]]
    with torch.no_grad():
        expected = um.logprobs(hybrid.model, documents)
    engine = hybrid.engine(step_tokens=1024)
    scored = engine.score(documents)
    assert sum(bits(a, b) for a, b in zip(scored, expected, strict=True)) == 2047 + 2 + 1099
