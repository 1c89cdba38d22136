"""A weight update between steps: nothing old lives on, and every token knows its version."""

from typing import Any

import pytest
import torch

from unified_models.engine import Sampling


def change(trial: Any, value: float) -> None:
    """What a trainer in the same process does to weights that it shares."""
    with torch.no_grad():
        trial.model.salt.master.fill_(value)
    trial.model.commit()


def test_a31_an_update_drops_the_prefix_cache(trial: Any, bits: Any) -> None:
    prompts = trial.prompts(100)
    engine = trial.engine()
    before = engine.generate(prompts, Sampling(max_tokens=8))[0]
    change(trial, 5.0)
    after = engine.generate(prompts, Sampling(max_tokens=8))[0]
    fresh = trial.engine().generate(prompts, Sampling(max_tokens=8))[0]
    assert after.ids == fresh.ids and bits(after.logprobs, fresh.logprobs) == 8
    assert trial.check(prompts, [after]) == 8
    assert engine.stats.prefix_hits == 0
    assert (before.versions, after.versions) == ([0] * 8, [1] * 8)
    assert before.logprobs.tolist() != after.logprobs.tolist()
    change(trial, 3.0)
    back = engine.generate(prompts, Sampling(max_tokens=8))[0]
    assert back.ids == before.ids and bits(back.logprobs, before.logprobs) == 8


def test_a31_running_requests_are_recomputed(trial: Any, bits: Any) -> None:
    """Each token's logprob is that of its version's weights over its whole prefix."""
    engine = trial.engine(step_tokens=16)
    prompts = trial.prompts(40, 20)
    requests = [
        engine.submit(prompt, Sampling(max_tokens=40, seed=i)) for i, prompt in enumerate(prompts)
    ]
    (scored,) = trial.prompts(200, offset=3)
    scoring = engine.submit_score(scored)
    for value in (3.0, 4.0, 9.0):
        if value != 3.0:
            change(trial, value)
        for _ in range(12):
            engine.step()
    engine.run()
    assert engine.stats.weight_version == 2 and engine.stats.updates == 2
    assert engine.stats.tokens_recomputed > 0
    compared = 0
    for version, value in enumerate((3.0, 4.0, 9.0)):
        change(trial, value)
        for prompt, request in zip(prompts, requests, strict=True):
            out = request.output()
            mine = torch.tensor(out.versions) == version
            expected = trial.whole([*prompt, *out.ids])[len(prompt) - 1 :]
            compared += bits(out.logprobs[mine], expected[mine])
    assert compared == 80
    assert all(request.versions == sorted(request.versions) for request in requests)
    assert bits(scoring.output().logprobs, trial.whole(scored)) == 199


def test_a31_nothing_old_is_found_and_the_new_is(trial: Any) -> None:
    (prompt,) = trial.prompts(100)
    engine = trial.engine()
    request = engine.submit(prompt, Sampling(max_tokens=30))
    for _ in range(5):
        engine.step()
    pools = [table.pool for table in engine._memory.tables.values()]
    assert all(pool._pages for pool in pools)
    engine._adopt(1)
    assert not any(pool._pages or pool._names or pool._idle or pool.used for pool in pools)
    engine.run()
    assert engine.stats.prefix_hits == 0
    assert trial.check([prompt], [request.output()]) == 30
    outs = engine.generate([prompt], Sampling(max_tokens=3))
    assert trial.check([prompt], outs) == 3
    assert engine.stats.prefix_hits == 96


def test_a07_commits_without_a_change(trial: Any, bits: Any) -> None:
    prompts = trial.prompts(50, 20)
    engine = trial.engine()
    first = engine.generate(prompts, Sampling(max_tokens=6))
    for sync in range(1, 21):
        trial.model.salt.assign(torch.tensor([3.0]))
        outs = engine.generate(prompts, Sampling(max_tokens=6))
        compared = sum(bits(a.logprobs, b.logprobs) for a, b in zip(first, outs, strict=True))
        assert compared == 12
        assert outs[0].versions == [sync] * 6
    assert engine.stats.prefix_hits == 0


def test_an_uncommitted_change_is_refused(trial: Any) -> None:
    engine = trial.engine()
    with torch.no_grad():
        trial.model.salt.master.fill_(5.0)
    with pytest.raises(RuntimeError, match="salt: the master changed since the last commit"):
        engine.generate([[1, 2]], Sampling(max_tokens=2))
    trial.model.commit()
    prompts = trial.prompts(4)
    outs = engine.generate(prompts, Sampling(max_tokens=2))
    assert trial.check(prompts, outs) == 2 and outs[0].versions == [1, 1]


@pytest.mark.parametrize("version", [0, -1, 1.5, True, "2"])
def test_versions_grow(trial: Any, version: Any) -> None:
    with pytest.raises(ValueError, match="version must be an int larger than the present 0"):
        trial.engine().update_weights([], version=version)
