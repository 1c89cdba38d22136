"""Choosing tokens: a pure function of seed, index and row."""

from typing import Any

import pytest
import torch

from unified_models.engine import Sampling, draw


def test_exponentials_have_the_distribution() -> None:
    e = draw.exponentials([draw.key(0, 0, i) for i in range(64)], 4096, torch.device("cpu"))
    assert bool((e > 0).all() and e.isfinite().all())
    n = e.numel()
    assert abs(float(e.double().mean()) - 1) < 5 / n**0.5
    assert abs(float(e.double().var()) - 1) < 15 / n**0.5
    for x in (1e-4, 0.01, 0.5, 3.0):
        p = 1 - torch.tensor(-x, dtype=torch.float64).exp()
        assert abs(float((e < x).double().mean() - p)) < 5 * float((p * (1 - p) / n) ** 0.5)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_have_the_distribution(temperature: float) -> None:
    """Frequencies of 20000 draws within 5 standard deviations."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    n = 20000
    keys = [draw.key(7, 0, i) for i in range(n)]
    ids = draw.choose(logits.expand(n, 5), torch.full((n,), temperature), keys)
    p = torch.softmax(logits.double() / temperature, -1)
    got = torch.bincount(ids, minlength=5) / n
    assert bool(((got - p).abs() <= 5 * (p * (1 - p) / n).sqrt() + 1e-12).all()), (got, p)


@pytest.mark.parametrize("size", [1, 2, 7, 16, 33, 512, 1000])
def test_a_draw_does_not_depend_on_its_neighbours(size: int) -> None:
    keys = [draw.key(1, 2, i) for i in range(37)]
    together = draw.exponentials(keys, size, torch.device("cpu"))
    alone = torch.cat([draw.exponentials([k], size, torch.device("cpu")) for k in keys])
    assert torch.equal(together.view(torch.int32), alone.view(torch.int32))
    logits = torch.randn(37, size)
    t = torch.full((37,), 0.7)
    ids = draw.choose(logits, t, keys)
    one_by_one = [draw.choose(logits[i : i + 1], t[:1], [k]) for i, k in enumerate(keys)]
    assert torch.equal(ids, torch.cat(one_by_one))


def test_known_draws() -> None:
    """splitmix64 by whole numbers."""
    mask = (1 << 64) - 1
    (row,) = draw.exponentials([12345], 3, torch.device("cpu"))
    for column, value in enumerate(row):
        z = (12345 + (column + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ z >> 27) * 0x94D049BB133111EB) & mask
        u = torch.tensor((z ^ z >> 31) >> 11).float() * 2.0**-53
        assert float(value) == pytest.approx(float(-torch.log1p(-u)), rel=1e-6)


def test_greedy_takes_the_lower_id_of_a_tie() -> None:
    for size in (5, 64, 1000):
        logits = torch.zeros(40, size)
        logits[:, 3] = logits[:, size - 1] = 2.0
        assert draw.choose(logits, torch.ones(40), [None] * 40).tolist() == [3] * 40


def test_keys_differ() -> None:
    keys = {draw.key(s, i, n) for s in range(-3, 8) for i in range(11) for n in range(11)}
    assert len(keys) == 11**3


def test_streams_of_one_seed(trial: Any) -> None:
    engine = trial.engine()
    same = [[5, 6, 7]] * 8
    outs = engine.generate(same, Sampling(max_tokens=16, seed=1))
    assert len({tuple(out.ids) for out in outs}) == 8
    again = engine.generate(same[:3], Sampling(max_tokens=16, seed=1))
    assert [out.ids for out in again] == [out.ids for out in outs[:3]]
    other = engine.generate(same, Sampling(max_tokens=16, seed=2))
    assert not {tuple(out.ids) for out in other} & {tuple(out.ids) for out in outs}
    listed = engine.generate(same[:2], [Sampling(max_tokens=16, seed=1)] * 2)
    assert listed[0].ids == listed[1].ids == outs[0].ids


def test_a_shorter_request_draws_the_same(trial: Any) -> None:
    engine = trial.engine()
    long, short = (engine.generate([[9]], Sampling(max_tokens=n))[0] for n in (20, 7))
    assert long.ids[:7] == short.ids
    stop = long.ids[4]
    stopped = engine.generate([[9]], Sampling(max_tokens=20, stop_ids=(stop,)))[0]
    assert stopped.ids == long.ids[: long.ids.index(stop) + 1]
    assert (stopped.reason, long.reason) == ("stop", "length")
    assert len(stopped.logprobs) == len(stopped.ids) == len(stopped.versions)


def test_greedy_is_reported_at_one(trial: Any) -> None:
    prompts = trial.prompts(12, 30)
    outs = trial.engine().generate(prompts, Sampling(max_tokens=9, temperature=0))
    assert trial.check(prompts, outs, temperature=1.0) == 18
    again = trial.engine().generate(prompts, Sampling(max_tokens=9, temperature=0, seed=5))
    assert [out.ids for out in again] == [out.ids for out in outs]


def test_a13_temperature_of_the_logprobs(trial: Any, bits: Any) -> None:
    prompts = trial.prompts(12, 30)
    engine = trial.engine()
    compared = 0
    for temperature in (0.6, 1.0, 1.7):
        outs = engine.generate(prompts, Sampling(max_tokens=9, temperature=temperature))
        compared += trial.check(prompts, outs, temperature)
        (scored,) = engine.score([prompts[1] + outs[1].ids], temperature=temperature)
        compared += bits(scored[-9:], outs[1].logprobs)
    assert compared == 81


def test_a05_a_certain_token_has_a_finite_logprob(trial: Any, monkeypatch: Any) -> None:
    v = torch.arange(64)
    peaked = lambda hidden, ctx: torch.where(v == hidden.long() % 64, 200.0, 0.0)  # noqa: E731
    monkeypatch.setattr(trial.model, "logits", peaked)
    engine = trial.engine()
    (out,) = engine.generate(trial.prompts(8), Sampling(max_tokens=32))
    assert len(out.logprobs) == 32
    assert bool((out.logprobs.isfinite() & (out.logprobs <= 0)).all())
    (scored,) = engine.score([[1, 2, 3, 4]])
    assert len(scored) == 3 and bool(scored.isfinite().all())
