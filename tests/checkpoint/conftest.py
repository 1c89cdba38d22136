"""The toy architecture, known to the registry while a test of checkpoints runs."""

import importlib.util
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unified_models as um
from tests.mixed import released
from unified_models import checkpoint, registry
from unified_models.model import LanguageModel

LAYERS = ["mamba", "moe", "mamba", "attention", "moe", "attention"]


@pytest.fixture(scope="session")
def toy_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("toy", Path(__file__).with_name("toy.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["toy"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def toy(toy_file: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    find, known = registry.find, registry.architectures
    monkeypatch.setattr(registry, "architectures", lambda: [*known(), "toy"])
    monkeypatch.setattr(registry, "find", lambda name: toy_file if name == "toy" else find(name))
    yield toy_file


@pytest.fixture
def loaded(toy: Any, tmp_path: Path) -> Callable[..., LanguageModel]:
    """`loaded(state, **load options)`: a model from these tensors."""

    def load(
        state: dict[str, Tensor], config: dict[str, Any] | None = None, **options: Any
    ) -> LanguageModel:
        folder = toy.write(
            tmp_path / f"loaded{len(list(tmp_path.iterdir()))}", state, config=config
        )
        return checkpoint.load(folder, **options)

    return load


def bits(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's bytes."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()


@pytest.fixture
def same() -> Callable[[Tensor, Tensor], bool]:
    """Equal in dtype, shape and every bit."""

    def equal(a: Tensor, b: Tensor) -> bool:
        return (a.dtype, a.shape) == (b.dtype, b.shape) and np.array_equal(bits(a), bits(b))

    return equal


@pytest.fixture
def pointers() -> Callable[[LanguageModel], dict[str, int]]:
    """Where every tensor of a model lives."""

    def of(model: LanguageModel) -> dict[str, int]:
        found = {name: t.data_ptr() for name, t in model.named_parameters()}
        return found | {name: t.data_ptr() for name, t in model.named_buffers()}

    return of


@pytest.fixture(scope="session")
def mixed() -> Callable[..., dict[str, Any]]:
    return released


@pytest.fixture(scope="session")
def nemotrons(tmp_path_factory: pytest.TempPathFactory, mixed: Any) -> Callable[..., Path]:
    """`nemotrons(said)`: a tiny checkpoint with this quantization_config; "mixed": as a release has it."""
    made: dict[str, Path] = {}

    def make(said: Any = "mixed", seed: int = 0) -> Path:
        key = f"{json.dumps(said)} {seed}"
        if key not in made:
            made[key] = tmp_path_factory.mktemp("nemotron") / "checkpoint"
            config = mixed(LAYERS) if said == "mixed" else said
            um.make_tiny(
                "nemotron_h",
                made[key],
                seed,
                layers_block_type=LAYERS,
                quantization_config=config,
            )
        return made[key]

    return make


@pytest.fixture
def changed(nemotrons: Any, tmp_path: Path) -> Callable[..., Path]:
    """`changed(edit, said)`: a copy of a checkpoint whose tensors `edit` has changed in place."""

    def make(edit: Callable[[dict[str, Tensor]], object], said: Any = "mixed") -> Path:
        folder = tmp_path / f"changed{len(list(tmp_path.iterdir()))}"
        shutil.copytree(nemotrons(said), folder)
        state = load_file(folder / "model.safetensors")
        edit(state)
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return make
