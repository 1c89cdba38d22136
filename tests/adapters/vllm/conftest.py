"""Real vLLM, in processes of its own; tiny checkpoints with a tokenizer."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import unified_models as um
from tests.lacking import without
from unified_models.adapters.vllm import plugin

HERE = Path(__file__).parent
TINY = HERE.parents[2] / "configs/tiny"
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": ("deepseek_v4", {}),  # FP8 weights and caches
    "nemotron_h": ("nemotron_h", {"config": TINY / "nemotron_h_mixed.json"}),  # FP8, NVFP4
    "qwen3": ("qwen3", {}),
}


@pytest.fixture(scope="session")
def vllm() -> str:
    """The release; skips with the reason where there is none, unless REQUIRE_VLLM=1 asks for it."""
    release = plugin.found()
    if release is None:
        told = Path(sys.prefix, "vllm.txt")
        reason = f"no vLLM: {told.read_text().strip() if told.exists() else 'not installed'}"
        without(reason, "REQUIRE_VLLM")
    return release


@pytest.fixture(scope="session")
def checkpoint(vllm: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`checkpoint(name)`: a tiny one, with a tokenizer of one word a token."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            architecture, options = CHECKPOINTS[name]
            made[name] = tmp_path_factory.mktemp("vllm") / name
            um.make_tiny(architecture, made[name], seed=2, **options)
            add_tokenizer(made[name])
        return made[name]

    return make


def add_tokenizer(folder: Path) -> None:
    """512 words: t0, t1, ..."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{i}": i for i in range(512)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def environment(**more: str) -> dict[str, str]:
    """One thread, quiet, and no look at the hub."""
    fixed = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    return {**os.environ, **fixed, **more}


@pytest.fixture
def surroundings() -> Callable[..., dict[str, str]]:
    """The environment of a process that runs vLLM."""
    return environment


@pytest.fixture
def child(vllm: str) -> Callable[..., Any]:
    """`child(job, folder, **environment)`: what a job of child.py found."""

    def run(job: str, folder: Path, **more: str) -> Any:
        command = [sys.executable, str(HERE / "child.py"), job, str(folder)]
        done = subprocess.run(
            command, env=environment(**more), capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.strip().splitlines()[-1])

    return run
