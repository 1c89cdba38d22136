"""No schedule changes a bit: step sizes, seats, pages, prefix hits, preemptions, poisoned memory, neighbours.

Everything is compared with the whole sequence in one pack without past. Test names begin with the row of the field
cases that they answer.
"""

from typing import Any

import pytest

from unified_models.engine import Sampling

SCHEDULES: dict[str, dict[str, Any]] = {
    "default": {},
    "not_poisoned": {"poison": False, "step_tokens": 50},
    "step1": {"step_tokens": 1},
    "step5_seats3": {"step_tokens": 5, "max_sequences": 3},
    "step16": {"step_tokens": 16},
    "step17_page8": {"step_tokens": 17, "page_tokens": 8},
    "page1": {"page_tokens": 1},
    "page4_seats1": {"page_tokens": 4, "max_sequences": 1},
    "page64": {"page_tokens": 64},
    "one_step": {"step_tokens": 4096, "prefix_cache": False},
    "tight": {"cache_tokens": 128, "step_tokens": 40},
    "tight_no_prefix": {"cache_tokens": 128, "step_tokens": 40, "prefix_cache": False},
    "tight_page32": {"cache_tokens": 128, "page_tokens": 32, "step_tokens": 33},
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_b03_b04_schedules_agree(trial: Any, options: dict[str, Any]) -> None:
    prompts = trial.prompts(1, 2, 33, 90, 17, 64)
    sampling = Sampling(max_tokens=30, temperature=0.7, seed=3)
    expected = [out.ids for out in trial.engine().generate(prompts, sampling)]
    engine = trial.engine(**{"poison": True, **options})
    compared = 0
    for _ in range(2):
        outs = engine.generate(prompts, sampling)
        assert [out.ids for out in outs] == expected
        compared += trial.check(prompts, outs, 0.7)
    assert compared == 360
    assert engine.stats.steps and engine.stats.tokens_sampled == 360
    if "cache_tokens" in options:
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("length", [15, 16, 17, 32])
def test_b01_warm_equals_cold(trial: Any, bits: Any, length: int) -> None:
    (prompt,) = trial.prompts(length)
    engine = trial.engine()
    cold, warm, warmer = (engine.generate([prompt], Sampling(max_tokens=5))[0] for _ in range(3))
    assert cold.ids == warm.ids == warmer.ids
    assert bits(cold.logprobs, warm.logprobs) + bits(cold.logprobs, warmer.logprobs) == 10
    assert trial.check([prompt], [cold]) == 5
    # at least the last token of the prompt runs
    assert engine.stats.prefix_hits == 2 * ((length - 1) // 16 * 16)


@pytest.mark.parametrize("length", [127, 128, 129, 255, 256, 384])
def test_b13_lengths_around_the_step(trial: Any, bits: Any, length: int) -> None:
    (prompt,) = trial.prompts(length)
    engine = trial.engine(step_tokens=128)
    outs = engine.generate([prompt], Sampling(max_tokens=3))
    assert trial.check([prompt], outs) == 3
    assert bits(engine.score([prompt])[0], trial.whole(prompt)) == length - 1


def test_b14_the_longest_sequence_there_can_be(trial: Any) -> None:
    for options in ({"cache_tokens": 100}, {"cache_tokens": 100, "page_tokens": 32}):
        engine = trial.engine(**options)
        for length in (99, 98, 1):
            prompts = trial.prompts(length)
            outs = engine.generate(prompts, Sampling(max_tokens=100 - length))
            assert trial.check(prompts, outs) == 100 - length
        assert len(engine.score(trial.prompts(100))[0]) == 99


def test_b14_an_idle_engine_does_nothing(trial: Any) -> None:
    engine = trial.engine()
    before = vars(engine.stats).copy()
    assert engine.step() is False
    engine.run()
    assert engine.generate([]) == [] and engine.score([]) == []
    assert [len(lp) for lp in engine.score([[], [5]])] == [0, 0]
    assert vars(engine.stats) == before
    prompts = trial.prompts(5)
    assert trial.check(prompts, engine.generate(prompts, Sampling(max_tokens=2))) == 2
    assert engine.step() is False


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b11_preempted_requests_lose_nothing(trial: Any, bits: Any, prefix_cache: bool) -> None:
    """A cache for one and a half of two requests that grow to 300 tokens each, beside one that is scored."""
    prompts = trial.prompts(200, 200)
    engine = trial.engine(cache_tokens=450, prefix_cache=prefix_cache, poison=True)
    requests = [
        engine.submit(prompt, Sampling(max_tokens=100, seed=i)) for i, prompt in enumerate(prompts)
    ]
    (scored,) = trial.prompts(300, offset=1)
    scoring = engine.submit_score(scored)
    engine.run()
    assert engine.stats.preemptions > 0 and engine.stats.tokens_recomputed > 0
    assert trial.check(prompts, [request.output() for request in requests]) == 200
    assert bits(scoring.output().logprobs, trial.whole(scored)) == 299
    alone = trial.engine().generate(prompts, [Sampling(max_tokens=100, seed=i) for i in range(2)])
    assert [request.sampled for request in requests] == [out.ids for out in alone]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_b11_a_scored_sequence_is_preempted(trial: Any, bits: Any, prefix_cache: bool) -> None:
    """It keeps the logprobs it has. With a prefix cache it goes on from the last page; else its rows run again."""
    engine = trial.engine(step_tokens=20, prefix_cache=prefix_cache, poison=True)
    (scored,) = trial.prompts(80)
    scoring = engine.submit_score(scored)
    for _ in range(3):
        engine.step()
    kept = list(scoring.logprobs)
    assert len(kept) == 60
    engine._scheduler._preempt(scoring)
    engine.run()
    assert scoring.logprobs[:60] == kept
    assert bits(scoring.output().logprobs, trial.whole(scored)) == 79
    hit = 48 if prefix_cache else 0
    assert (engine.stats.prefix_hits, engine.stats.tokens_recomputed) == (hit, 60 - hit)
    assert engine.stats.tokens_scored == 79


@pytest.mark.parametrize("lengths", [(100, 100), (160, 150)])
def test_requests_do_not_take_turns_in_giving_way(trial: Any, lengths: tuple[int, int]) -> None:
    """Who was preempted, or does not fit beside the others, waits until there is room for all of it."""
    engine = trial.engine(cache_tokens=250, prefix_cache=False)
    prompts = trial.prompts(*lengths)
    outs = engine.generate(prompts, Sampling(max_tokens=64))
    assert trial.check(prompts, outs) == 128
    assert engine.stats.preemptions == (lengths == (100, 100))


def test_preempted_requests_come_back_in_order(trial: Any) -> None:
    engine = trial.engine(max_sequences=3, step_tokens=64)
    requests = [
        engine.submit(prompt, Sampling(max_tokens=30)) for prompt in trial.prompts(9, 9, 9, 9)
    ]
    engine.step()
    trial.model.salt.assign(trial.model.salt.master + 1)
    engine.step()
    assert engine._scheduler.running == requests[:3]
    engine._scheduler._preempt(requests[2])
    engine.step()
    assert engine._scheduler.running == requests[:3]
    assert list(engine._scheduler.waiting) == requests[3:]


def test_c21_the_same_prompt_three_times(trial: Any, bits: Any) -> None:
    (prompt,) = trial.prompts(301)
    engine = trial.engine()
    hits, first = [0], None
    compared = 0
    for _ in range(3):
        out = engine.generate([prompt], Sampling(max_tokens=10))[0]
        hits.append(engine.stats.prefix_hits)
        first = first or out
        assert out.ids == first.ids
        compared += bits(out.logprobs, first.logprobs)
    assert compared == 30 and trial.check([prompt], [first]) == 10
    assert hits == [0, 0, 288, 576]  # 18 pages of 16, short of the last token


@pytest.mark.parametrize("length", [1, 2, 3, 4, 127, 128])
def test_c20_short_prompts_and_those_around_a_window(trial: Any, length: int) -> None:
    prompts = trial.prompts(length)
    assert trial.check(prompts, trial.engine().generate(prompts, Sampling(max_tokens=6))) == 6


def test_b06_long_after_short(trial: Any) -> None:
    engine = trial.engine(cache_tokens=1200)
    for length in (16, 16, 1029):
        prompts = trial.prompts(length)
        assert trial.check(prompts, engine.generate(prompts, Sampling(max_tokens=4))) == 4


def test_d05_only_complete_pages_are_reused(trial: Any) -> None:
    """A page that was cut by a step boundary, and a prompt that ends within one."""
    engine = trial.engine(step_tokens=13, page_tokens=16)
    first, second = trial.prompts(70)[0], [*trial.prompts(70)[0][:45], 1, 2, 3, 4]
    for prompt, hit in ((first, 0), (second, 32), (first[:33], 32), (first[:32], 16)):
        before = engine.stats.prefix_hits
        assert trial.check([prompt], engine.generate([prompt], Sampling(max_tokens=4))) == 4
        assert engine.stats.prefix_hits - before == hit


def test_g08_prefix_cache_off_is_off(trial: Any) -> None:
    (prompt,) = trial.prompts(100)
    engine = trial.engine(prefix_cache=False)
    assert engine.stats.prefix_cache is False and "prefix_cache=False" in repr(engine)
    for _ in range(3):
        assert trial.check([prompt], engine.generate([prompt], Sampling(max_tokens=4))) == 4
    assert engine.stats.prefix_hits == 0
    assert engine.stats.tokens == 3 * 103
    assert trial.engine().stats.prefix_cache is True


def test_a_step_mixes_sampling_and_prompts(trial: Any) -> None:
    engine = trial.engine(step_tokens=10)
    prompts = trial.prompts(5, 50)
    outs = engine.generate(prompts, Sampling(max_tokens=12))
    assert trial.check(prompts, outs) == 24
    assert engine.stats.mixed_steps >= 5


def test_many_share_a_growing_prefix(trial: Any) -> None:
    """Turns of a conversation: what was sampled is a prefix of the next prompt."""
    engine = trial.engine(cache_tokens=512, poison=True)
    prompts = trial.prompts(20, 30)
    compared = 0
    for turn in range(5):
        outs = engine.generate(prompts, Sampling(max_tokens=21, seed=turn))
        compared += trial.check(prompts, outs)
        prompts = [p + out.ids + [turn] for p, out in zip(prompts, outs, strict=True)]
    assert compared == 210
    assert engine.stats.prefix_hits > 300


def test_eviction_under_load(trial: Any) -> None:
    """More prefixes than memory: the oldest are gone, the rest are right."""
    engine = trial.engine(cache_tokens=256, poison=True)
    compared = 0
    for i in [0, 1, 2, 3, 4, 5, 3, 5, 0, 1]:
        prompts = trial.prompts(80, offset=7 * i)
        compared += trial.check(prompts, engine.generate(prompts, Sampling(max_tokens=4)))
    assert compared == 40
    assert 0 < engine.stats.prefix_hits < 5 * 64
