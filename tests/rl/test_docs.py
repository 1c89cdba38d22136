"""The runs that docs/rl.md shows: what it says of them is so."""

import json
from pathlib import Path
from typing import Any

import pytest

from unified_models.rl.command import mean_reward
from unified_models.rl.config import config_from, differences, read_config
from unified_models.rl.storage import read_metrics

ROOT = Path(__file__).parents[2]
RUNS = sorted(file.parent for file in (ROOT / "docs/rl").rglob("metrics.jsonl"))
MAY_DIFFER = ("mode", "seed", "train.lr")
OVER_VLLM = ("engine", "rollout.page_tokens", "model.overrides.chunk_size")


def load(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The config as it ran, and its metrics."""
    raw = json.loads((folder / "config.json").read_text())
    return raw, read_metrics(folder / "metrics.jsonl")


@pytest.mark.parametrize("folder", RUNS, ids=lambda f: f"{f.parent.name}-{f.name}")
def test_run(folder: Path) -> None:
    raw, records = load(folder)
    config = config_from(raw, str(folder))
    apart = differences(read_config(ROOT / f"configs/rl/{folder.parent.name}.toml"), config)
    allowed = MAY_DIFFER + (OVER_VLLM if config.engine == "vllm" else ())
    assert {line.split(":")[0] for line in apart} <= set(allowed)
    assert [r["step"] for r in records] == list(range(1, config.steps + 1))
    assert all(r["compared"] == r["tokens"] > 0 for r in records)
    unequal = sum(r["unequal"] for r in records)
    if config.mode == "baseline":
        assert unequal > 0
        return
    assert unequal == 0
    if config.train.lr == 0:
        assert config.steps == 20
    else:
        assert config.steps == 100
        assert mean_reward(records[-10:]) >= mean_reward(records[:10]) + 0.2


@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v4"])
@pytest.mark.parametrize("task", ["arithmetic", "calculator"])
def test_each_architecture_and_task_has_three_seeds_and_a_baseline(name: str, task: str) -> None:
    found = {f.name for f in RUNS if f.parent.name == f"{name}_{task}"}
    assert found >= {"consistent_0", "consistent_1", "consistent_2", "baseline_0"}
    assert (ROOT / f"docs/rl/{name}_{task}.png").stat().st_size < 300_000
