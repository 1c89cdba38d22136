"""Small random checkpoints: every part of an architecture present, and no value that would hide a fault."""

import hashlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unified_models import registry
from unified_models.checkpoint import save
from unified_models.checkpoint.implied import bind_implied
from unified_models.config import load_json
from unified_models.model import LanguageModel
from unified_models.weight import Table, Weight

SUMMANDS, LEVELS = 6, 1 << 16
LARGEST = 1_000_000_000
"""Parameters of a tiny model: 4 GB of masters. A released config.json is far beyond."""


def make_tiny(
    name: str,
    folder: str | Path,
    seed: int = 0,
    *,
    config: str | Path | None = None,
    **config_overrides: Any,
) -> None:
    """Write a small random checkpoint of an architecture: `Config.tiny(**config_overrides)`, official names.

    config: a config.json to start from instead of the architecture's tiny one. The same seed gives the same bytes on
    every machine.

    Raises:
        ValueError: an unknown architecture or config key, a config file of another architecture or with more than
            LARGEST parameters, or a folder that holds files. Nothing has been written then.
    """
    write_tiny(name, folder, config_overrides, seed=seed, config=config)


def write_tiny(
    name: str,
    folder: str | Path,
    config_overrides: Mapping[str, Any],
    *,
    seed: int = 0,
    config: str | Path | None = None,
) -> None:
    """`make_tiny`, for overrides whose keys someone typed."""
    module = registry.find(name)
    if config is None:
        cfg = module.Config.tiny(**config_overrides)
    else:
        raw = _read(name, Path(config)) | dict(config_overrides)
        cfg = module.Config.from_json(raw, str(config))
    with torch.device("meta"):
        count = sum(p.numel() for p in module.Model(cfg).parameters())
    if count > LARGEST:
        raise ValueError(
            f"{config or name}: {count:,} parameters, and a tiny model has at most {LARGEST:,}"
        )
    model: LanguageModel = module.Model(cfg)
    bind_implied(model)
    randomize(model, seed)
    save(model, folder)


def _read(name: str, file: Path) -> dict[str, Any]:
    raw = load_json(file)
    if raw.get("model_type") != name:
        raise ValueError(f"{file}: model_type = {raw.get('model_type')!r}, not {name!r}")
    return raw


@torch.no_grad()
def randomize(model: LanguageModel, seed: int = 0) -> None:
    """Fill every Weight and Table, each from its own stream (seed, module path), and commit.

    Norm weights are around 1, biases and sinks of size 0.5, matrices N(0, 1/K) so that rows of unit size stay so, heads
    and embeddings three times that; each row of a table holds distinct whole numbers. `Weight.init` overrides.
    """
    model.name_parts()
    for path, weight in model.weights():
        assert weight.master is not None, f"{path}: nothing to fill"
        weight.master.copy_(INITS[weight.init or rule(weight)](weight.shape, stream(seed, path)))
    model.commit()
    for path, table in model.tables():
        table.data.copy_(distinct(table, stream(seed, path)))


def stream(seed: int, path: str) -> torch.Generator:
    """The random numbers of one tensor; they do not depend on what else the model has."""
    return torch.Generator().manual_seed(digest(seed, path))


def digest(seed: int, path: str) -> int:
    """A seed of its own for each tensor."""
    return int.from_bytes(hashlib.sha256(f"{seed} {path}".encode()).digest()[:8], "little")


def normal(shape: torch.Size, generator: torch.Generator) -> Tensor:
    """float32, mean 0, deviation 1, nearly normal: sums of whole numbers, since those have the same bits on every CPU,
    and logarithms do not."""
    levels = torch.randint(LEVELS, (SUMMANDS, *shape), generator=generator).sum(0)
    deviation = math.sqrt(SUMMANDS * (LEVELS**2 - 1) / 12)
    return ((levels.double() - SUMMANDS * (LEVELS - 1) / 2) / deviation).float()


def distinct(table: Table, generator: torch.Generator) -> Tensor:
    """Whole numbers below `table.upper`, no two alike in a row."""
    assert table.upper is not None, f"{table.label}: no upper bound to draw from"
    rows, columns = table.shape
    size, device = (rows, table.upper), generator.device
    keys = torch.randint(1 << 40, size, generator=generator, device=device)
    return keys.argsort(dim=1, stable=True)[:, :columns]


def rule(weight: Weight) -> str:
    """How a weight without `init` is filled."""
    if len(weight.shape) == 1:
        return "bias" if weight.exact else "norm"
    return "vocab" if weight.axes[0] == "vocab" else "matrix"


def _columns(shape: torch.Size) -> float:
    return math.sqrt(shape[-1])


Init = Callable[[torch.Size, torch.Generator], Tensor]
INITS: dict[str, Init] = {
    "norm": lambda shape, generator: 1 + 0.2 * normal(shape, generator),
    "bias": lambda shape, generator: 0.5 * normal(shape, generator),
    "score_bias": lambda shape, generator: 0.1 * normal(shape, generator),
    "dt_bias": lambda shape, generator: -3.5 + normal(shape, generator),
    "A_log": lambda shape, generator: 0.5 + 0.7 * normal(shape, generator),
    "input_scale": lambda shape, generator: 0.012 * (1 + 0.2 * normal(shape, generator)),
    "cache_scale": lambda shape, generator: 0.01 * (1 + 0.2 * normal(shape, generator)),
    "matrix": lambda shape, generator: normal(shape, generator) / _columns(shape),
    "vocab": lambda shape, generator: normal(shape, generator) * (3 / _columns(shape)),
}
"""Ways to fill a weight, by name; float32 arithmetic that rounds alike everywhere."""
