"""The recipe with its trainer cut over processes: exact, resumable in other layouts, and stopped as the others are."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models.adapters.fsdp.recipe import training
from unified_models.adapters.fsdp.trainer import ShardedTrainer
from unified_models.ops.operator import observe
from unified_models.rl.config import Config
from unified_models.rl.recipe import Recipe
from unified_models.rl.storage import Storage
from unified_models.rl.tasks import Problem
from unified_models.rl.tasks.arithmetic import Arithmetic
from unified_models.rl.trainer import Trainer
from unified_models.verify.compare import UnequalError, bits

Small = Callable[..., Config]
LAYOUTS: dict[str, dict[str, Any]] = {
    "nemotron_h": {"processes": 2, "micro_batch": 4, "packed": "rebuild"},
    "deepseek_v4": {"processes": 2, "experts": 2, "tokens": 2, "recompute": True},
}


class OddSum(Arithmetic):
    """Rewards what a model says before it has learned anything: 1 for an odd sum of all bytes."""

    def reward(self, problem: Problem, turns: Sequence[str]) -> float:
        return float(sum(map(ord, turns[0])) % 2)


def recipe(config: Config, storage: Storage, trainer: Trainer | None) -> Recipe:
    """One that has begun, rewarded from the first step on."""
    made = Recipe(config, storage, trainer=trainer)
    made.task = OddSum()
    made.begin()
    return made


def weights(trainer: Trainer) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.named_tensors()}


@pytest.mark.slow(60)
@pytest.mark.parametrize("name", LAYOUTS)
def test_recipe_over_processes_is_exact_F17(name: str, small: Small, tmp_path: Path) -> None:
    """No unequal bit, and the masters of a run in one process but for the order of sums; a resume goes on exactly, and
    what is left of the run may be done in another layout."""
    more: dict[str, Any] = {"rollout": {"prompts": 3, "group": 5}}
    config = small(name, train=LAYOUTS[name], **more)
    alone = small(name, **more)
    one = recipe(alone, Storage(tmp_path / "one", alone), None)
    before = weights(one.trainer)
    first = one.step()
    storage = Storage(tmp_path / "run", config)
    with training(config, storage.folder) as trainer:
        whole = recipe(config, storage, trainer)
        records = [whole.step()]
        moved, want, got = 0, weights(one.trainer), weights(whole.trainer)
        assert got.keys() == want.keys()
        for key, value in want.items():
            change = (value - before[key]).abs().max()
            moved += bool(change > 0)
            # AdamW turns the sign of a gradient near 0 into a step of lr.
            assert (got[key] - value).abs().double().mean() < 0.05 * change + 1e-8, key
        assert moved > len(want) / 2
        assert records[0]["reward"] == first["reward"] and records[0]["grad_norm"] > 0
        assert records[0]["grad_norm"] == pytest.approx(first["grad_norm"], rel=1e-3)
        whole.save()
        records += [whole.step() for _ in range(2)]
        ended = weights(whole.trainer)
    assert [r["version"] for r in records] == [2, 3, 4]
    assert all(r["unequal"] == 0 and r["compared"] == r["tokens"] > 0 for r in records)

    with training(config, storage.folder) as trainer:
        left = recipe(config, storage, trainer)
        assert left.steps == 1 and left.trainer.version == 3
        again = [left.step() for _ in range(2)]
        assert [r["loss"] for r in again] == [r["loss"] for r in records[1:]]
        result = bits(list(weights(left.trainer).values()), list(ended.values()))
        assert result.compared > 10_000 and result.unequal == 0

    fewer = small(name, train=LAYOUTS[name] | {"experts": 1, "tokens": 1}, **more)
    with training(fewer, storage.folder) as trainer:
        other = recipe(fewer, Storage(storage.folder, fewer), trainer)
        assert other.steps == 1
        record = other.step()
        assert record["reward"] == records[1]["reward"] and record["unequal"] == 0


@pytest.mark.slow(40)
def test_faults_of_processes(small: Small, tmp_path: Path) -> None:
    """A loss that stops a step leaves every weight; a process that dies is named, and the others end."""
    config = small(train={"processes": 2})
    with training(config, tmp_path) as trainer:
        assert isinstance(trainer, ShardedTrainer)
        sequences = [[1, 2, 3, 4], [5, 6, 7], [8, 9]]
        before = weights(trainer)
        want = trainer.logprobs(sequences, 0.7)

        def stop(lps: list[Tensor], places: range) -> Tensor:
            raise UnequalError("a bit")

        trainer.restart(1e-3)
        with pytest.raises(UnequalError, match="a bit"):
            trainer.step(sequences, 0.7, stop)
        lps = trainer.logprobs(sequences, 0.7)
        assert bits(lps, want).unequal == 0 and [len(lp) for lp in lps] == [3, 2, 1]
        again = weights(trainer)
        assert bits(list(again.values()), list(before.values())).unequal == 0
        trainer.step(sequences[:1], 0.7, lambda lps, _: -torch.cat(lps).sum())  # one has none
        assert trainer.version == 1
        assert bits(list(weights(trainer).values()), list(before.values())).unequal > 1000
        with pytest.raises(
            RuntimeError, match=r"training process \d of 2 failed: ValueError: .*512"
        ):
            trainer.logprobs([[1, 2], [3, 512]], 1.0)
        with pytest.raises(RuntimeError, match=r"training process \d of 2 ended"):
            trainer.logprobs(sequences, 0.7)
        assert all(not process.is_alive() for process in trainer._processes)


@pytest.mark.slow(20)
@pytest.mark.parametrize("ulps", [0, 1])
def test_one_ulp_in_an_operator_stops_every_process_A38(
    ulps: int, small: Small, tmp_path: Path
) -> None:
    """Of the sampler's side alone: the step is refused, and no weight moves on any process. Without it, it is not."""
    config = small(train={"processes": 2})
    with training(config, tmp_path) as trainer:
        made = recipe(config, Storage(tmp_path, config), trainer)
        made.sync()
        before, generate = weights(trainer), made.rollout.generate

        def off(name: str, out: Any) -> Any:
            if name == "rms_norm":
                out.view(torch.int16)[0, 0] ^= ulps
            return out

        def faulty(*args: Any) -> Any:
            with torch.no_grad(), observe(off):
                return generate(*args)

        made.rollout.generate = faulty  # type: ignore[method-assign]
        if ulps:
            with pytest.raises(UnequalError, match=r"\d+ of \d+ sampled tokens have other bits"):
                made.step()
        else:
            assert made.step()["compared"] > 0
        result = bits(list(weights(trainer).values()), list(before.values()))
        assert result.compared > 10_000 and (result.unequal == 0) == bool(ulps)


def test_checkpoints_of_another_kind_are_refused(small: Small, tmp_path: Path) -> None:
    config = small(warmup={"steps": 1}, train={"processes": 2})
    alone = small(warmup={"steps": 1})
    recipe(alone, Storage(tmp_path, alone), None)
    with (
        training(config, tmp_path) as trainer,
        pytest.raises(ValueError, match=r"go on with train\.processes = 1"),
    ):
        recipe(config, Storage(tmp_path, config), trainer)


def test_layouts_are_checked(small: Small) -> None:
    with pytest.raises(ValueError, match="experts = 3 does not divide processes = 4"):
        small(train={"processes": 4, "experts": 3})
    with pytest.raises(ValueError, match=r"train\.processes = 2 with mode = 'baseline'"):
        small(mode="baseline", train={"processes": 2})
    with pytest.raises(ValueError, match="known: resident, rebuild"):
        small(train={"packed": "no"})
