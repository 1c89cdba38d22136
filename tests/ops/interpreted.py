"""A child that runs kernels on CPU, by Triton's interpreter: it is asked for before Triton is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.lacking import without


def interpreted(child: str, told: str) -> None:
    """Run tests/ops/triton_`child`.py, whose last line must be `told`: how much it compared. Skips without Triton."""
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    run = subprocess.run(
        [sys.executable, "-m", f"tests.ops.triton_{child}"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1:] == [told]
