"""The config file: what is unknown, of a wrong type or out of range is refused with its key and value."""

from pathlib import Path

import pytest

from unified_models.rl.config import Config, config_from, differences, read_config

ROOT = Path(__file__).parents[2]
LEAST = {"task": "arithmetic", "out": "x", "model": {"architecture": "nemotron_h"}}

WRONG = {
    "unknown key": ({"tasks": 1}, ["tasks"]),
    "unknown key in a table": ({"train": {"learning_rate": 1}}, ["learning_rate", "train"]),
    "wrong type": ({"steps": "many"}, ["steps", "'many'"]),
    "no task": ({"task": "chess"}, ["chess", "arithmetic", "calculator"]),
    "no mode": ({"mode": "exact"}, ["exact", "consistent, baseline"]),
    "baseline that stops": ({"mode": "baseline", "check": "stop"}, ["stop", "baseline"]),
    "baseline elsewhere": ({"mode": "baseline", "engine": "vllm"}, ["vllm", "embedded"]),
    "engine": ({"engine": "sglang"}, ["sglang", "embedded"]),
    "loss": ({"loss": {"kind": "ppo"}}, ["ppo", "grpo, dapo"]),
    "correction": ({"loss": {"correction": "cis"}}, ["cis", "none, tis, mis"]),
    "negative lr": ({"train": {"lr": -1.0}}, ["lr", "-1.0"]),
    "lr that is no number": ({"train": {"lr": float("nan")}}, ["lr", "nan"]),
    "lr without end": ({"train": {"lr": float("inf")}}, ["lr", "inf"]),
    "group of one": ({"rollout": {"group": 1}}, ["group", "1"]),
    "updates": ({"train": {"updates": 3}}, ["updates = 3", "prompts = 8"]),
    "no model": ({"model": {}}, ["architecture", "folder"]),
    "two models": ({"model": {"architecture": "a", "folder": "b"}}, ["'a'", "'b'"]),
    "greedy": ({"rollout": {"temperature": 0.0}}, ["temperature", "0.0"]),
}


@pytest.mark.parametrize("case", WRONG)
def test_config_refuses(case: str) -> None:
    wrong, named = WRONG[case]
    with pytest.raises(ValueError) as told:
        config_from(LEAST | wrong, "run.toml")
    for part in ("run.toml", *named):
        assert part in str(told.value)


def test_missing_key_is_named() -> None:
    with pytest.raises(ValueError, match="out"):
        config_from({key: value for key, value in LEAST.items() if key != "out"}, "run.toml")


def test_changes_and_defaults(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('task = "arithmetic"\nout = "x"\n[model]\narchitecture = "qwen3"\n')
    config = read_config(file, [("train.lr", 0), ("mode", "baseline"), ("seed", 2)])
    assert (config.train.lr, config.mode, config.seed) == (0.0, "baseline", 2)
    assert config.checking == "report"
    assert read_config(file).checking == "stop"
    with pytest.raises(ValueError, match=r"task\.lr is set, but task is no table"):
        read_config(file, [("task.lr", 1)])
    file.write_text("task = ")
    with pytest.raises(ValueError, match="not TOML"):
        read_config(file)


def test_differences_name_key_and_both_values() -> None:
    config = config_from(LEAST, "")
    other = config_from(LEAST | {"steps": 3, "out": "y", "train": {"lr": 1.0}, "seed": 4}, "")
    assert differences(config, config) == []
    assert sorted(differences(config, other)) == ["seed: 0, 4", "train.lr: 0.001, 1.0"]


@pytest.mark.parametrize("file", sorted((ROOT / "configs/rl").glob("*.toml")), ids=lambda f: f.stem)
def test_configs_in_the_repository(file: Path) -> None:
    config = read_config(file)
    assert isinstance(config, Config)
    assert config.out == f"results/rl/{file.stem}"
