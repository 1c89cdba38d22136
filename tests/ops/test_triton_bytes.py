"""What DeepGEMM is given: rows quantised by Triton's interpreter, and a stand-in that insists on the library's layouts;
tests/gpu has the library."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from tests.lacking import without


def test_deep_gemm_is_given_what_it_reads() -> None:
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    run = subprocess.run(
        [sys.executable, "-m", "tests.ops.triton_bytes_child"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert "72 calls agree" in run.stdout
