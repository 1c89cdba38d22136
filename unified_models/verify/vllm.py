"""Verification against real vLLM, in a process of its own: vLLM reads its settings as it is imported."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ADAPTER = "unified_models.adapters.vllm.verify"


def against_vllm(folder: Path, numerics: Sequence[str], seed: int, json_file: Path | None) -> int:
    """Print the adapter's report; its exit status: 0 where everything agrees and enough was compared.

    ValueError: more than one setting of numerics.
    """
    if len(numerics) != 1:
        raise ValueError(f"vLLM runs one setting of numerics at a time, got {list(numerics)}")
    command = [sys.executable, "-m", ADAPTER, str(folder), numerics[0], str(seed)]
    return subprocess.run([*command, *([str(json_file)] if json_file else [])]).returncode
