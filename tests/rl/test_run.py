"""The loop: exact at every step, under every option, and not by looking away."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models.engine import Output, Sampling
from unified_models.rl.check import check
from unified_models.rl.config import Config
from unified_models.rl.episodes import roll_out
from unified_models.rl.recipe import Recipe, load_start, run
from unified_models.rl.rollout import EmbeddedRollout, Rollout
from unified_models.verify.compare import UnequalError, bits

BOTH = ["nemotron_h", "deepseek_v4"]
Make = Callable[..., Recipe]
Small = Callable[..., Config]
Same = Callable[[dict[str, Tensor], dict[str, Tensor]], int]


@pytest.mark.parametrize("name", BOTH)
def test_run_is_exact_while_it_learns(name: str, small: Small, tmp_path: Path) -> None:
    records = list(run(small(name), tmp_path / "run"))
    assert [r["step"] for r in records] == [1, 2, 3]
    assert [r["version"] for r in records] == [2, 3, 4]
    assert all(r["unequal"] == 0 and r["compared"] == r["tokens"] > 0 for r in records)
    assert all(r["kl"] == r["apart"] == r["ratio_off"] == 0 for r in records)


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", BOTH)
def test_rounds_without_learning_stay_exact_A07_F16(
    name: str, recipe: Make, same_bits: Same
) -> None:
    """Learning rate 0: 20 rounds of sync and rollout, 0 unequal in each, and every weight has its first bits."""
    rollout, warmup = {"prompts": 1, "group": 4}, {"steps": 0}
    made = recipe(name, steps=20, train={"lr": 0.0}, rollout=rollout, warmup=warmup)
    before = made.trainer.state().tensors
    records = [made.step() for _ in range(20)]
    after = made.trainer.state().tensors
    assert [r["version"] for r in records] == list(range(20))
    assert all(r["unequal"] == 0 and r["compared"] > 0 for r in records)
    assert sum(r["grad_norm"] > 0 for r in records) > 0
    weights = [{n: t for n, t in s.items() if n.startswith("model/")} for s in (before, after)]
    assert same_bits(weights[0], weights[1]) > 10_000


def test_lr_above_zero_moves_the_weights(recipe: Make) -> None:
    """The control of the test above: the same steps with a learning rate."""
    made = recipe(train={"lr": 1e-3})
    before = made.trainer.state().tensors
    assert max(made.step()["grad_norm"] for _ in range(4)) > 0
    after = made.trainer.state().tensors
    assert any(not torch.equal(before[n], after[n]) for n in before if n.startswith("model/"))


@pytest.mark.parametrize("name", BOTH)
def test_ratio_is_one_in_any_grouping_A06(name: str, recipe: Make) -> None:
    """Old logprobs by one grouping, the update by another: each ratio is exactly 1."""
    made = recipe(name)
    made.sync()
    episodes = roll_out(
        made.rollout, made.task, seed=5, step=0, prompts=2, group=3, temperature=1.0
    )
    sequences = [e.ids for e in episodes]
    reported = [e.sampled for e in episodes]
    compared = 0
    for size, order in ((0, 1), (1, 1), (2, 1), (4, -1), (1, -1)):
        made.trainer.micro_batch = size  # type: ignore[attr-defined]
        lps = made.trainer.logprobs(sequences[::order], 1.0)[::order]
        again = [e.of_sampled(lp) for e, lp in zip(episodes, lps, strict=True)]
        result = bits(reported, again)
        assert result.unequal == 0
        compared += result.compared
        ratios: list[Tensor] = []

        def loss(lps: list[Tensor], places: range, ratios: list[Tensor] = ratios) -> Tensor:
            own = [episodes[i].of_sampled(lp) for i, lp in zip(places, lps, strict=True)]
            ratios += [(lp - reported[i]).exp().detach() for i, lp in zip(places, own, strict=True)]
            return torch.cat(own).sum() * 0

        made.trainer.step(sequences, 1.0, loss)
        assert torch.cat(ratios).eq(1).all() and len(torch.cat(ratios)) == result.compared
        made.trainer.restart(0.0)
    assert compared > 0


OPTIONS: dict[str, dict[str, Any]] = {
    "dapo": {"loss": {"kind": "dapo", "clip_high": 0.28}},
    "tis": {"loss": {"correction": "tis"}},
    "mis": {"loss": {"correction": "mis"}},
    "kl": {"loss": {"kl_coef": 0.1}},
    "micro_batches": {"train": {"micro_batch": 2}},
    "float32": {"model": {"numerics": "float32"}},
    "warm": {"rollout": {"temperature": 0.7}},
    "qwen3": {"model": {"architecture": "qwen3", "overrides": {}}},
}


@pytest.mark.parametrize("option", OPTIONS)
def test_run_is_exact_with(option: str, small: Small, tmp_path: Path) -> None:
    records = list(run(small(steps=2, **OPTIONS[option]), tmp_path / "run"))
    assert len(records) == 2
    assert all(r["unequal"] == 0 and r["compared"] == r["tokens"] > 0 for r in records)


def test_several_updates_compare_each_token_under_its_own_version(recipe: Make) -> None:
    made = recipe(train={"updates": 2, "lr": 3e-3})
    records = [made.step() for _ in range(2)]
    assert [r["version"] for r in records] == [2, 4]
    assert [r["staleness"] for r in records] == [1, 1]
    assert all(r["unequal"] == 0 and r["compared"] == r["tokens"] > 0 for r in records)
    assert max(r["ratio_off"] for r in records) > 0, "the second update saw the first one's weights"


def test_check_refuses_tokens_of_another_version(recipe: Make) -> None:
    made = recipe()
    made.sync()
    episodes = roll_out(
        made.rollout, made.task, seed=5, step=0, prompts=1, group=2, temperature=1.0
    )
    lps = made.trainer.logprobs([e.ids for e in episodes], 1.0)
    assert check(episodes, lps, 2, stop=True).bits.unequal == 0
    with pytest.raises(ValueError, match="weight version 2, compared under 3"):
        check(episodes, lps, 3, stop=True)


class Faulty:
    """A rollout whose reported logprob of one token is one ulp off; everything else is the engine's."""

    def __init__(self, inner: Rollout, sequence: int, token: int) -> None:
        self.inner, self.sequence, self.token = inner, sequence, token
        self.told: float | None = None

    @property
    def version(self) -> int:
        return self.inner.version

    @property
    def prefix_hits(self) -> int:
        return self.inner.prefix_hits

    def update(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.inner.update(named_tensors, version)

    def generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> Sequence[Output]:
        outs = self.inner.generate(prompts, samplings)
        lps = outs[self.sequence].logprobs
        lps[self.token] = torch.nextafter(lps[self.token], torch.tensor(-100.0))
        self.told = float(lps[self.token])
        return outs


@pytest.mark.parametrize("reuse", [False, True])
def test_one_ulp_is_named_and_stops_before_any_update_A38(
    reuse: bool, recipe: Make, same_bits: Same
) -> None:
    """Also where the old logprobs are not computed again: the training forward is compared then."""
    train = {"reuse_rollout_logprobs": reuse, "acceptance_steps": 1, "micro_batch": 2}
    made = recipe(train=train)
    assert made.step()["reused"] is False
    made.rollout = faulty = Faulty(made.rollout, 4, 0)
    before = made.trainer.state().tensors
    with pytest.raises(UnequalError) as told:
        made.step()
    pattern = int(torch.tensor(faulty.told).view(torch.int32)) & 0xFFFFFFFF
    assert "sequence 4, sampled token 0" in str(told.value)
    assert f"rollout {pattern:#010x}, training {pattern - 1:#010x}" in str(told.value)
    assert same_bits(before, made.trainer.state().tensors) > 0


def test_report_goes_on_and_says_how_many(recipe: Make) -> None:
    made = recipe(check="report", train={"reuse_rollout_logprobs": True, "acceptance_steps": 1})
    made.rollout = Faulty(made.rollout, 1, 0)
    records = [made.step() for _ in range(2)]
    assert [r["unequal"] for r in records] == [1, 1]
    assert [r["reused"] for r in records] == [False, False], "accepted in spite of an unequal bit"


def test_reuse_begins_after_acceptance_and_is_still_compared(recipe: Make) -> None:
    made = recipe(train={"reuse_rollout_logprobs": True, "acceptance_steps": 2})
    records = [made.step() for _ in range(3)]
    assert [r["reused"] for r in records] == [False, False, True]
    assert all(r["unequal"] == 0 and r["compared"] == r["tokens"] > 0 for r in records)


def test_reuse_changes_no_bit_of_training(recipe: Make, same_bits: Same) -> None:
    states = []
    for reuse in (False, True):
        train = {"reuse_rollout_logprobs": reuse, "acceptance_steps": 1, "updates": 2}
        made = recipe(train=train)
        reused = [made.step()["reused"] for _ in range(3)]
        assert reused == [False, reuse, reuse]
        states.append(made.trainer.state().tensors)
    assert same_bits(*states) > 0


def test_comparing_nothing_fails_A38(recipe: Make) -> None:
    made = recipe()
    with pytest.raises(UnequalError, match="nothing was compared"):
        check([], [], 0, stop=False)
    assert made.step()["compared"] > 0


def test_check_off_reports_nothing(recipe: Make) -> None:
    record = recipe(check="off").step()
    assert record["unequal"] is record["compared"] is record["kl"] is None


def test_baseline_runs_the_same_file_and_differs(small: Small, tmp_path: Path) -> None:
    records = list(run(small(mode="baseline", warmup={"steps": 10}), tmp_path / "run"))
    assert len(records) == 3
    assert sum(r["compared"] for r in records) == sum(r["tokens"] for r in records) > 0
    assert sum(r["unequal"] for r in records) > 0
    assert all((r["apart"] > 0) >= (r["unequal"] > 0) or r["kl"] >= 0 for r in records)


@pytest.mark.parametrize("name", BOTH)
def test_calculator_keeps_the_first_turn_in_memory(name: str, small: Small, tmp_path: Path) -> None:
    """The second turn's prompt is all that was said and heard; the engine has its beginning, and the mask marks what
    the model sampled."""
    config = small(name, task="calculator")
    rollout = EmbeddedRollout(load_start(config, tmp_path), config.rollout)
    seen: list[list[Sequence[int]]] = []
    engine_generate = rollout.generate
    hits: list[int] = []

    def generate(prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]) -> Any:
        seen.append(list(prompts))
        outs = engine_generate(prompts, samplings)
        hits.append(rollout.prefix_hits)
        return outs

    rollout.generate = generate  # type: ignore[method-assign]
    recipe = Recipe(config, _storage(tmp_path, config), rollout)
    episodes = roll_out(rollout, recipe.task, seed=0, step=0, prompts=2, group=2, temperature=1.0)
    assert len(seen) == 2 and len(hits) == 2
    assert hits[1] - hits[0] >= 8 * len(episodes)
    for episode, first, second in zip(episodes, *seen, strict=True):
        assert second[: len(first)] == list(first)
        assert episode.ids[: len(second)] == list(second)
        assert len(episode.ids) == len(episode.said)
        assert len(episode.versions) == len(episode.sampled) == sum(episode.said)
        assert not any(episode.said[: len(first)]) and all(episode.said[len(second) :])
        assert not all(episode.said[len(first) :]), "the tool's text is in the response mask"
    lps = recipe.trainer.logprobs([e.ids for e in episodes], 1.0)
    assert check(episodes, lps, 0, stop=True).bits.compared == sum(
        len(e.versions) for e in episodes
    )


def _storage(folder: Path, config: Config) -> Any:
    from unified_models.rl.storage import Storage

    return Storage(folder, config)


def test_draws_use_no_global_generator(recipe: Make) -> None:
    made = recipe()
    before = torch.random.get_rng_state()
    made.step()
    assert torch.equal(before, torch.random.get_rng_state())


def test_small_vocabulary_is_refused(small: Small, tmp_path: Path) -> None:
    config = small(model={"overrides": {"vocab_size": 128}})
    with pytest.raises(ValueError, match="vocab_size = 128"):
        load_start(config, tmp_path)
