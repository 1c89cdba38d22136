"""The plugin beside releases that it knows and others, and vLLM's own tables after it has run."""

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unified_models.adapters.vllm import plugin


@pytest.mark.parametrize("release", ["0.26.0", "0.32.0", "0.33.1", "0.32.0+cpu", "0.30.1.dev5"])
def test_known_releases_G09(release: str) -> None:
    assert plugin.unknown(release) is None


@pytest.mark.parametrize("release", ["0.25.1", "0.34.0", "1.0.0"])
def test_other_releases_register_nothing_G05_G09(
    release: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, with what is known and what was found; nothing is imported, so nothing else in the process breaks."""
    monkeypatch.setattr(plugin, "found", lambda: release)
    monkeypatch.setitem(sys.modules, "vllm", None)
    with caplog.at_level(logging.WARNING):
        plugin.register()
    assert f"knows vLLM 0.26 to 0.33; {release} is installed: not registered" in caplog.text


def test_without_vllm_G06(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin.unknown(None) == "unified_models knows vLLM 0.26 to 0.33; it is not installed"


@pytest.mark.vllm
def test_registers_once_and_touches_nothing_else_G01_G10(
    vllm: str, surroundings: Callable[..., dict[str, str]]
) -> None:
    """As an installed entry point, called twice: our names are added, all others are what they were; no CUDA."""
    program = """
import json, logging
from importlib.metadata import entry_points
from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.transformers_utils import config
tables = (ModelRegistry.models, MODELS_CONFIG_MAP, config._CONFIG_FORMAT_TO_CONFIG_PARSER,
          WeightTransferEngineFactory._registry)
before = [dict(table) for table in tables]
(point,) = [p for p in entry_points(group="vllm.general_plugins") if p.name == "unified_models"]
register = point.load()
register(); register()
new = [sorted(table.keys() - old.keys()) for table, old in zip(tables, before)]
same = all(table[key] is old[key] for table, old in zip(tables, before) for key in old)
import torch
print(json.dumps([new, same, torch.cuda.is_initialized()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=surroundings(VLLM_LOGGING_LEVEL="ERROR"),
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    ours: Any = [["UnifiedForCausalLM"], ["UnifiedForCausalLM"], ["unified"], ["unified"]]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == [ours, True, False]
