"""The recipe with real vLLM as its engine, by the command, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lacking import without
from unified_models.adapters.vllm import plugin
from unified_models.rl.storage import read_metrics

pytestmark = pytest.mark.vllm
CONFIGS = Path(__file__).parents[2] / "configs/rl"
FEW = [
    *("engine=vllm", "steps=3", "warmup.steps=3", "rollout.prompts=2", "rollout.group=3"),
    *("train.reuse_rollout_logprobs=true", "train.acceptance_steps=2", "rollout.page_tokens=16"),
]


@pytest.mark.slow(60)
@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v4"])
def test_recipe_over_vllm_is_exact(name: str, tmp_path: Path) -> None:
    if plugin.found() is None:
        without("no vLLM", "REQUIRE_VLLM")
    more = [f"out={tmp_path / 'run'}"]
    if name == "nemotron_h":
        more += ["model.overrides.chunk_size=16", "train.processes=2"]
    command = [str(Path(sys.executable).with_name("unified-models")), "rl"]
    command += [str(CONFIGS / f"{name}_calculator.toml")]
    command += [part for text in (*FEW, *more) for part in ("--set", text)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    records = read_metrics(tmp_path / "run/metrics.jsonl")
    assert [r["version"] for r in records] == [3, 4, 5]
    assert [r["reused"] for r in records] == [False, False, True]
    assert all(r["unequal"] == 0 and r["compared"] == r["tokens"] > 0 for r in records)
    if name == "nemotron_h":  # DeepSeek-V4's pages are longer than these conversations
        assert sum(r["prefix_hits"] for r in records) > 0, "turns and groups share beginnings"
