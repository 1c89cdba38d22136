"""float32 products by parts of K, run on CPU by Triton's interpreter; tests/gpu has their bits."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.lacking import without


def test_kernels_mean_what_the_cpu_computes() -> None:
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton_split_child"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "68 calls agree" in run.stdout
