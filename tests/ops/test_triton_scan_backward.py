"""The scan's gradients by kernels, by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lacking import without


@pytest.mark.slow(35)
def test_gradients_are_those_of_the_recurrence_and_backward_D10() -> None:
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton_scan_backward_child"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "69356 values agree" in run.stdout
