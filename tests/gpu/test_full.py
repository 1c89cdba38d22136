"""Real vLLM with CUDA graphs at a model's own widths, random weights: every sampled token against training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from unified_models.adapters.vllm import plugin

CONFIGS = Path(__file__).parents[2] / "configs"
CUTS = {
    "nemotron_3_nano_30b": (
        "hybrid_override_pattern=MEM*EME",
        "num_hidden_layers=7",
        ".blocks=700",
    ),
    "deepseek_v4_flash": (
        "num_hidden_layers=6",
        "compress_ratios=[0,4,128,4,128,4]",
        "num_hash_layers=1",
        "expert_dtype=fp8",
        "num_nextn_predict_layers=0",
        ".blocks=900",
    ),
}
LOAD = (".requests=256", ".tokens=200", ".concurrent=128")
"""Blocks: too few for as many requests, so that some are preempted."""


@pytest.mark.parametrize("name", CUTS)
def test_graphs_have_the_trainers_bits_A36(name: str) -> None:
    """Mixed batches, too little memory, and every weight replaced while requests run."""
    if plugin.found() is None:
        pytest.skip("vLLM is not installed")
    command = [sys.executable, "-m", "unified_models.adapters.vllm.full"]
    run = subprocess.run(
        [*command, str(CONFIGS / f"{name}.json"), *CUTS[name], *LOAD],
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    told = json.loads(run.stdout[run.stdout.index("{\n") :])
    assert told["graphs"] == "FULL" and told["preemptions"] > 0 and told["control"] > 0
    assert (told["compared"], told["unequal"]) == (256 * 200, 0)
    assert told["before update"].startswith("0 of ")
