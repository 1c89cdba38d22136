"""All that tokens keep, over pages, and what a bench times, by Triton's interpreter."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lacking import without


@pytest.mark.parametrize(
    ("child", "count"),
    [
        pytest.param("paged", 30276, id="paged-B07"),
        pytest.param("pool", 200265, id="pool", marks=pytest.mark.slow(35)),
        pytest.param("bench", 368, id="bench"),
    ],
)
def test_steps_in_pages_have_the_bits_of_a_pack(child: str, count: int) -> None:
    if importlib.util.find_spec("triton") is None:
        without("no Triton, which comes with vLLM", "REQUIRE_VLLM")
    run = subprocess.run(
        [sys.executable, "-m", f"tests.ops.triton_{child}_child"],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert f"{count} values agree" in run.stdout
