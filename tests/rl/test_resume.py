"""A run that was left, or killed, goes on exactly: weights, optimizer, versions, draws and metrics."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from safetensors.torch import load_file
from torch import Tensor

from unified_models.rl.config import Config
from unified_models.rl.recipe import Recipe, run
from unified_models.rl.storage import Storage, read_metrics
from unified_models.rl.trainer import FILE

Small = Callable[..., Config]
Timeless = Callable[[dict[str, Any]], dict[str, Any]]
Same = Callable[[dict[str, Tensor], dict[str, Tensor]], int]
LONG = {"steps": 6, "checkpoint_every": 3, "warmup": {"steps": 30, "batch": 8}}


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v4"])
def test_resume_is_exact_A35_F17(
    name: str, small: Small, timeless: Timeless, same_bits: Same, tmp_path: Path
) -> None:
    """With a reference model loaded: masters, moments, versions, the first rollout's logprobs, and all metrics."""
    config = small(name, loss={"kl_coef": 0.05}, **LONG)
    whole = Recipe(config, Storage(tmp_path / "whole", config))
    whole.begin()
    for _ in range(3):
        whole.step()
    whole.save()
    state = whole.trainer.state()
    left = Recipe(config, whole.storage)
    left.begin()
    assert left.steps == 3 and left.trainer.version == state.version == 33
    assert same_bits(left.trainer.state().tensors, state.tensors) > 10_000
    assert any(n.startswith("adamw/exp_avg_sq/") and t.any() for n, t in state.tensors.items())
    for _ in range(3):
        one, other = whole.step(), left.step()
        assert timeless(one) == timeless(other)
        assert one["unequal"] == 0 and one["compared"] == one["tokens"] > 0
        assert one["version"] == 29 + one["step"]
    assert same_bits(left.trainer.state().tensors, whole.trainer.state().tensors) > 10_000
    assert left.reference is not None and whole.reference is not None
    referred = dict(left.reference.named_tensors())
    assert same_bits(referred, dict(whole.reference.named_tensors())) > 0
    now = {n: state.tensors[f"model/{n}"] for n in referred}
    with pytest.raises(AssertionError):
        same_bits(referred, now)


def test_forgetting_the_moments_would_be_seen(
    small: Small, timeless: Timeless, tmp_path: Path
) -> None:
    """The control: the same resume with an optimizer that starts anew takes another step."""
    config = small(**LONG | {"warmup": {"steps": 60}})
    whole = Recipe(config, Storage(tmp_path, config))
    whole.begin()
    for _ in range(3):
        whole.step()
    whole.save()
    left = Recipe(config, whole.storage)
    left.begin()
    left.trainer.restart(config.train.lr)
    pairs = [(timeless(whole.step()), timeless(left.step())) for _ in range(3)]
    assert any(one != other for one, other in pairs)


def child(config: Config, folder: Path) -> subprocess.Popen[bytes]:
    """The command in a process of its own."""
    raw = msgspec.to_builtins(config)
    lines = [
        f"{key} = {json.dumps(value)}" for key, value in raw.items() if type(value) is not dict
    ]
    for table in ("warmup", "rollout", "train", "loss"):
        lines += [f"[{table}]", *(f"{k} = {json.dumps(v)}" for k, v in raw[table].items())]
    overrides = raw["model"]["overrides"]
    lines += ["[model]", f'architecture = "{raw["model"]["architecture"]}"', "[model.overrides]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in overrides.items()]
    file = folder / "run.toml"
    file.write_text("\n".join(lines) + "\n")
    code = "from unified_models.cli import main; main()"
    args = [sys.executable, "-c", code, "rl", str(file), "--set", f"out={folder / 'run'}"]
    return subprocess.Popen(args, stdout=subprocess.DEVNULL)


@pytest.mark.slow(30)
def test_kill_9_and_resume_is_an_unbroken_run(
    small: Small, timeless: Timeless, same_bits: Same, tmp_path: Path
) -> None:
    config = small(**LONG | {"steps": 8, "warmup": {"steps": 60, "batch": 8}})
    metrics = tmp_path / "run/metrics.jsonl"
    for seen in (2, 5):
        process = child(config, tmp_path)
        while not metrics.exists() or len(read_metrics(metrics)) < seen:
            assert process.poll() is None, "the child ended by itself"
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert child(config, tmp_path).wait() == 0
    resumed = read_metrics(metrics)
    unbroken = list(run(config, tmp_path / "unbroken"))
    assert len(resumed) == 8
    assert [timeless(r) for r in resumed] == [timeless(r) for r in unbroken]
    states = []
    for folder in ("run", "unbroken"):
        storage = Storage(tmp_path / folder, config)
        newest = storage.newest()
        assert newest is not None and newest.name == "step-000008"
        states.append(load_file(newest / FILE))
    assert same_bits(*states) > 10_000


def test_checkpoint_that_was_not_finished_is_no_checkpoint(small: Small, tmp_path: Path) -> None:
    config = small()
    storage = Storage(tmp_path, config)
    list(run(config, tmp_path))
    whole = storage.newest()
    assert whole is not None and whole.name == "step-000003"
    (storage.checkpoints / ".step-000009.partial").mkdir()
    assert storage.newest() == whole
    with storage.metrics.open("a") as file:
        file.write('{"step": 4, "rew')
    assert [r["step"] for r in read_metrics(storage.metrics)] == [1, 2, 3]
    assert [r["step"] for r in run(small(steps=4), tmp_path)] == [4]
    assert [r["step"] for r in read_metrics(storage.metrics)] == [1, 2, 3, 4]
    assert [p.name for p in sorted(storage.checkpoints.glob("step-*"))] == [
        "step-000003",
        "step-000004",
    ]


def test_folder_of_another_run_is_refused(small: Small, tmp_path: Path) -> None:
    list(run(small(steps=1), tmp_path))
    with pytest.raises(ValueError, match=r"train\.lr: 0\.001, 0\.5"):
        list(run(small(steps=2, train={"lr": 0.5}), tmp_path))


def test_state_of_another_model_is_refused(small: Small, tmp_path: Path) -> None:
    config = small(warmup={"steps": 1})
    made = Recipe(config, Storage(tmp_path, config))
    made.begin()
    state = made.trainer.state()
    state.tensors["adamw/exp_avg/blocks.9.x"] = next(iter(state.tensors.values()))
    with pytest.raises(ValueError, match=r"exp_avg/blocks\.9\.x"):
        made.trainer.restore(state)
