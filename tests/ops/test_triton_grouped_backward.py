"""The kernels of a backward, run on CPU by Triton's interpreter; tests/gpu has their bits."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lacking import without


@pytest.mark.slow(30)
@pytest.mark.parametrize(("child", "calls"), [("grouped", 397), ("local", 114)])
def test_gradients_are_those_of_the_references(child: str, calls: int) -> None:
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    run = subprocess.run(
        [sys.executable, "-m", f"tests.ops.triton_{child}_backward_child"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"{calls} calls agree" in run.stdout
