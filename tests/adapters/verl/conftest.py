"""verl, in an environment of its own beside ours: its pins and ours exclude each other."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

import unified_models as um
from tests.lacking import without
from unified_models.adapters.vllm import plugin
from unified_models.adapters.vllm.verify import ENVIRONMENT

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
VENV = Path(os.environ.get("VERL_VENV", f"{sys.prefix}-verl"))
NAMES = ("nemotron_h", "deepseek_v4")


@pytest.fixture(scope="session")
def verl() -> Path:
    """Its interpreter; skips with the reason where there is none, unless REQUIRE_TRAINERS=1 asks for it."""
    python = VENV / "bin/python"
    if not python.exists():
        told = Path(sys.prefix, "verl.txt")
        reason = f"no verl: {told.read_text().strip() if told.exists() else f'no {python}'}"
        without(reason, "REQUIRE_TRAINERS")
    return python


@pytest.fixture(scope="session")
def checkpoints(verl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny checkpoint of each architecture."""
    folder = tmp_path_factory.mktemp("verl")
    for name in NAMES:
        um.make_tiny(name, folder / name, seed=2)
    return folder


@pytest.fixture(scope="session")
def child(verl: Path) -> Callable[..., Any]:
    """`child(file, *arguments, ...)`: what a child file printed. modules: that verl imports by itself. python: another
    interpreter. more: of the environment."""

    def run(
        file: str,
        *arguments: object,
        modules: str = "unified_models.adapters.verl",
        python: Path = verl,
        more: Mapping[str, str] = MappingProxyType({}),
    ) -> Any:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": f"{ROOT}:{HERE}",
            "PYTHONWARNINGS": "ignore",
            "VERL_PLATFORM": "cpu",
            "VERL_USE_EXTERNAL_MODULES": f"platform_cpu,{modules}".rstrip(","),
            "VERL_LOGGING_LEVEL": "ERROR",
            **more,
        }
        command = [str(python), str(HERE / file), *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run


@pytest.fixture
def serving(verl: Path) -> dict[str, Any]:
    """How to run a child where vLLM is: in our environment, with verl's packages behind ours."""
    if plugin.found() is None:
        without("no vLLM", "REQUIRE_VLLM")
    (site,) = verl.parents[1].glob("lib/python3.*/site-packages")
    environment = ENVIRONMENT | {"VLLM_NO_USAGE_STATS": "1"}
    return {"site": site, "how": {"python": Path(sys.executable), "more": environment}}
