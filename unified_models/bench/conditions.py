"""Under which conditions something was measured."""

import os
import platform
from pathlib import Path
from typing import Any

import torch

from unified_models.model import LanguageModel


def conditions(name: str, model: LanguageModel, command: str) -> dict[str, Any]:
    """What a reader needs to judge a number, or to measure it again."""
    return {
        "command": command,
        "model": f"tiny {name}, {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters",
        "numerics": model.numerics,
    } | machine()


def machine() -> dict[str, Any]:
    """What it was measured on."""
    return {
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cpu": cpu_name(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def cpu_name() -> str:
    """The processor, as it calls itself."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
