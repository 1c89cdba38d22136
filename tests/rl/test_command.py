"""The command: what it prints, its exit status, and the plots."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unified_models import cli
from unified_models.rl.command import mean_reward, passed, summary
from unified_models.rl.config import Config
from unified_models.rl.recipe import run

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "configs/rl/nemotron_h_arithmetic.toml"
FEW = ["steps=2", "warmup.steps=2", "warmup.batch=4", "rollout.prompts=2", "rollout.group=2"]
Small = Callable[..., Config]


def command(*args: object) -> Any:
    """`unified-models rl` in this process."""
    return CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["rl", *map(str, args)])


def settings(*texts: str) -> list[str]:
    """--set for each."""
    return [part for text in (*FEW, *texts) for part in ("--set", text)]


@pytest.mark.parametrize("mode", ["consistent", "baseline"])
def test_command(mode: str, tmp_path: Path) -> None:
    result = command(CONFIG, *settings(f"out={tmp_path / 'run'}", f"mode={mode}"))
    assert result.exit_code == 0, result.output
    assert "step 1: reward" in result.output and "reward, last 10" in result.output
    assert len((tmp_path / "run/metrics.jsonl").read_text().splitlines()) == 2


def test_command_refuses_two_configs_and_other_keys(tmp_path: Path) -> None:
    assert command(CONFIG, CONFIG).exit_code == 2
    result = command(CONFIG, *settings(f"out={tmp_path}", "train.learning_rate=1"))
    assert result.exit_code == 2 and "learning_rate" in result.output
    assert not list(tmp_path.iterdir())


def test_command_fails_where_bits_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The plain operators on the trainer's side only."""
    from unified_models.context.plain import PlainContext
    from unified_models.rl import recipe as module

    class Mixed(module.Recipe):
        def begin(self) -> None:
            super().begin()
            self.trainer.context = PlainContext  # type: ignore[attr-defined]

    monkeypatch.setattr(module, "Recipe", Mixed)
    result = command(CONFIG, *settings(f"out={tmp_path / 'run'}"))
    assert result.exit_code == 1
    assert "other bits in the training forward" in result.output


def test_passed() -> None:
    """No steps, a step that compared nothing, and an unequal bit all fail."""
    good = {"compared": 3, "unequal": 0, "tokens": 3, "reward": 0.5}
    assert passed([good, good])
    assert not passed([])
    assert not passed([good, good | {"compared": 0}])
    assert not passed([good | {"compared": None, "unequal": None}])
    assert not passed([good | {"unequal": 1}])
    assert summary([good] * 12).row_count == 1
    assert mean_reward([good, good | {"reward": 1.0}]) == 0.75


def test_plots(small: Small, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for mode in ("consistent", "baseline"):
        list(run(small(mode=mode, steps=2), tmp_path / mode))
    picture = tmp_path / "runs.png"
    result = command(tmp_path / "consistent", tmp_path / "baseline", "--plot", picture)
    assert result.exit_code == 0, result.output
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000
    refused = command(tmp_path, "--plot", tmp_path / "none.png")
    assert refused.exit_code == 2 and "config.json is missing" in refused.output
    assert not (tmp_path / "none.png").exists()
    first = json.loads((tmp_path / "baseline/metrics.jsonl").read_text().splitlines()[0])
    line = json.dumps(first | {"compared": 0}) + "\n"
    (tmp_path / "baseline/metrics.jsonl").write_text(line)
    assert command(tmp_path / "baseline", "--plot", picture).exit_code == 2
