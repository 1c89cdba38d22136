"""Runs of a few steps with models of one layer of each kind."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models.rl.config import Config, config_from
from unified_models.rl.recipe import Recipe
from unified_models.rl.storage import Storage
from unified_models.rl.tasks import Problem
from unified_models.rl.tasks.arithmetic import Arithmetic

OVERRIDES: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention", "moe"],
        "chunk_size": 8,
        "hidden_size": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "num_hash_layers": 1,
        "compress_ratios": [0, 4, 8],
        "hidden_size": 128,
        "num_attention_heads": 2,
        "n_routed_experts": 4,
        "index_n_heads": 2,
        "hc_mult": 2,
        "num_nextn_predict_layers": 0,
    },
}
TIMES = ("tokens_per_second", "seconds_rollout", "seconds_check", "seconds_train")


def small_config(architecture: str = "nemotron_h", **changes: Any) -> Config:
    """A config of a run that takes seconds; changes by top-level key, tables merged."""
    raw: dict[str, Any] = {
        "task": "arithmetic",
        "out": "unused",
        "steps": 3,
        "checkpoint_every": 2,
        "model": {"architecture": architecture, "overrides": OVERRIDES[architecture]},
        "warmup": {"steps": 2, "batch": 4},
        "rollout": {"prompts": 2, "group": 3, "page_tokens": 8},
        "train": {"lr": 1e-3},
    }
    for key, value in changes.items():
        raw[key] = raw[key] | value if isinstance(raw.get(key), dict) else value
    return config_from(raw, "test")


class Parity(Arithmetic):
    """Rewards what a model says before it has learned anything: 1 for an even first byte."""

    def reward(self, problem: Problem, turns: Sequence[str]) -> float:
        return float(bool(turns[0]) and ord(turns[0][0]) % 2 == 0)


@pytest.fixture
def small() -> Callable[..., Config]:
    """`small_config`."""
    return small_config


@pytest.fixture
def recipe(tmp_path: Path) -> Callable[..., Recipe]:
    """Makes a recipe that has begun, with rewards from the first step on; its arguments are those of `small_config`."""

    def make(architecture: str = "nemotron_h", **changes: Any) -> Recipe:
        config = small_config(architecture, **changes)
        made = Recipe(config, Storage(tmp_path / f"run{len(list(tmp_path.iterdir()))}", config))
        made.task = Parity()
        made.begin()
        return made

    return make


@pytest.fixture
def timeless() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Takes what depends on the clock out of a line of metrics."""
    return lambda record: {key: value for key, value in record.items() if key not in TIMES}


@pytest.fixture
def same_bits() -> Callable[[dict[str, Tensor], dict[str, Tensor]], int]:
    """`compare`."""
    return compare


def compare(a: dict[str, Tensor], b: dict[str, Tensor]) -> int:
    """Assert that two sets of tensors have the same names and bytes; the number of elements compared."""
    assert a.keys() == b.keys()
    for name in a:
        x, y = (t[name].contiguous().view(-1).view(torch.uint8) for t in (a, b))
        assert torch.equal(x, y), name
    return sum(tensor.numel() for tensor in a.values())
