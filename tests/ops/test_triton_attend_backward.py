"""The backward kernels of attend_pages, run on CPU by Triton's interpreter; tests/gpu/test_backward_attend.py has them
at real sizes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lacking import without


@pytest.mark.slow(40)
def test_gradients_are_those_of_one_softmax() -> None:
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton_attend_backward_child"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "23 calls agree" in run.stdout
