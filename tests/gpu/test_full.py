"""Real vLLM with CUDA graphs at a model's own widths, random weights: every sampled token against training."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from tests.mixed import released
from unified_models.adapters.vllm import plugin
from unified_models.config import load_json

CONFIGS = Path(__file__).parents[2] / "configs"
NEMOTRON = ["mamba", "moe", "mamba", "attention", "moe", "mamba", "moe"]
CUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron": (
        "nemotron_3_nano_30b",
        {"hybrid_override_pattern": "MEM*EME", "num_hidden_layers": 7},
    ),
    "nemotron_mixed": (
        "nemotron_3_5_lightning_30b",
        {
            "layers_block_type": NEMOTRON,
            "num_hidden_layers": len(NEMOTRON),
            "num_nextn_predict_layers": 0,
            "quantization_config": released(NEMOTRON, 128),
        },
    ),
    "deepseek": (
        "deepseek_v4_flash",
        {
            "num_hidden_layers": 6,
            "compress_ratios": [0, 4, 128, 4, 128, 4],
            "num_hash_layers": 1,
            "expert_dtype": "fp8",
            "num_nextn_predict_layers": 0,
        },
    ),
}
"""Name -> a config, and what makes few layers of it."""
BLOCKS = {"nemotron": 700, "nemotron_mixed": 700, "deepseek": 900}
"""Too few for as many requests, so that some are preempted."""
LONG = 32768
FIRST, SECOND = "first", "second"
LANES = {"nemotron": SECOND, "nemotron_mixed": SECOND, "deepseek": FIRST}
"""Name -> whose runs go one after the other. Two fit beside the other tests of `make test-gpu`, which run meanwhile."""
SHARES = {"nemotron": 0.35, "nemotron_mixed": 0.35, "deepseek": 0.45}
"""Of an H200's memory, 140 GiB, which two of them and all other tests share."""


def told(name: str, folder: Path, *load: str, lane: str) -> dict[str, Any]:
    """What `adapters.vllm.full` says of a cut under a load. lane: whose runs go one after the other."""
    if plugin.found() is None:
        pytest.skip("vLLM is not installed")
    base, changes = CUTS[name]
    config = folder / "config.json"
    config.write_text(json.dumps(load_json(CONFIGS / f"{base}.json") | changes))
    command = [sys.executable, "-m", "unified_models.adapters.vllm.full", str(config), *load]
    command.append(f".memory={SHARES[name]}")
    with FileLock(Path(tempfile.gettempdir()) / f"unified_models_{lane}.lock"):
        run = subprocess.run(command, env=dict(os.environ), capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-3000:]
    report: dict[str, Any] = json.loads(run.stdout[run.stdout.index("{\n") :])
    print(name, report)
    assert report["graphs"] == "FULL" and report["control"] > 0
    return report


@pytest.mark.slow(120)
@pytest.mark.parametrize("name", CUTS)
def test_graphs_have_the_trainers_bits_A36(name: str, tmp_path: Path) -> None:
    """Mixed batches, too little memory, and every weight replaced while requests run."""
    load = (".requests=256", ".tokens=200", ".concurrent=128", f".blocks={BLOCKS[name]}")
    report = told(name, tmp_path, *load, ".cache=16", lane=LANES[name])
    assert report["preemptions"] > 0
    assert (report["compared"], report["unequal"]) == (256 * 200, 0)
    assert report["before update"].startswith("0 of ")


@pytest.mark.slow(110)
@pytest.mark.parametrize("name", ["nemotron", "deepseek"])
def test_a_long_sequence_has_the_trainers_bits(name: str, tmp_path: Path) -> None:
    """16 chunks of a prompt, then its last 256 tokens one by one."""
    load = (f".shortest={LONG - 256}", f".prompt={LONG - 256}", ".tokens=256", f".length={LONG}")
    report = told(
        name, tmp_path, *load, ".requests=1", ".update=false", ".cache=8", lane=LANES[name]
    )
    assert (report["compared"], report["unequal"]) == (256, 0)


@pytest.mark.slow(100)
def test_large_graphs_have_the_trainers_bits_B05(tmp_path: Path) -> None:
    """Up to 500 requests in a graph, of the largest size that vLLM captures."""
    load = (".requests=500", ".concurrent=512", ".tokens=24", ".prompt=16", ".update=false")
    report = told("nemotron", tmp_path, *load, ".cache=16", lane=FIRST)
    assert (report["compared"], report["unequal"]) == (500 * 24, 0)
