"""The scan and the convolution over pages, by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.lacking import without


def test_steps_in_pages_have_the_bits_of_a_pack() -> None:
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton_paged_child"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "30276 values agree" in run.stdout
