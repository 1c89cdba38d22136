"""`load_format="unified_random"`: a model of any size from its config.json alone, for benchmarks and full-width tests.

Every tensor is drawn when it is asked for, on the device, from a stream of its own, and quantised as a checkpoint holds
it; a class of vLLM's own that reads the same checkpoint names gets the same values.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.platforms import current_platform

from unified_models.checkpoint.implied import bind_implied
from unified_models.checkpoint.loading import build
from unified_models.checkpoint.names import Names, Part
from unified_models.checkpoint.quantized import LAYOUTS, pending
from unified_models.checkpoint.saving import settled
from unified_models.checkpoint.shards import DTYPE_NAMES, Pending, Shards, Stored
from unified_models.formats import Packed
from unified_models.tiny import digest, distinct, rule
from unified_models.weight import Table, Weight

FORMAT = "unified_random"
FURTHEST = 4
"""Deviations from the mean of a weight that must be above 0."""


class RandomShards(Shards):
    """The tensors that a checkpoint has of the model which a config.json describes: names, dtypes and shapes as
    `make_tiny` writes them, values as `SIZES` has them.

    ValueError: a folder without a config.json that an architecture reads, or a weight of a kind that SIZES has not.
    """

    def __init__(self, folder: Path, device: torch.device, seed: int = 0) -> None:
        with torch.device("meta"):
            model = build(folder)
            bind_implied(model)
        self.device, self.seed = device, seed
        self.offered: dict[str, Pending] = {}
        self.experts: set[str] = set()
        """names of tensors of one matrix of a stack"""
        self.last: tuple[Part, Packed] | None = None
        for part in Names.of(model).parts:
            if isinstance(part.owner, Weight) and kind_of(part.owner) not in SIZES:
                raise ValueError(f"{folder}: there are no random values for {part.name}")
            tensors = {tensor.name: tensor for tensor in self._tensors(part)}
            self.offered |= tensors
            self.experts |= tensors.keys() if part.index is not None else set()
        stored = {
            name: Stored(name, folder, DTYPE_NAMES[t.dtype], tuple(t.shape), t.size)
            for name, t in self.offered.items()
        }
        super().__init__(folder, stored, ())

    def read(self, name: str) -> Tensor:
        """The tensor in the checkpoint's dtype, on the device; the same bytes at every reading."""
        return self.offered[name].make()

    def close(self) -> None:
        """Let go of the codes whose scales may be asked for."""
        self.last = None

    def _tensors(self, part: Part) -> Iterator[Pending]:
        """What a file holds of one part."""
        owner = part.owner
        if isinstance(owner, Table):
            draw = partial(self._table, owner, part.name)
            yield Pending(part.name, torch.int64, part.shape, draw)
        else:
            yield from pending(part.name, owner.stored, part.shape, partial(self._packed, part))

    def _packed(self, part: Part) -> Packed:
        """Of a quantised part, kept until another one is asked for: codes and scales come one after the other."""
        if self.last is not None and self.last[0] is part:
            return self.last[1]
        self.last = None
        owner = part.owner
        assert isinstance(owner, Weight)
        packed = owner.stored.pack(self._master(owner, part))
        if owner.stored.name in LAYOUTS:
            packed = settled(owner.stored, packed, part.shape)
            self.last = part, packed
        return packed

    def _master(self, weight: Weight, part: Part) -> Tensor:
        """float32 values of one part."""
        values = torch.randn(part.shape, generator=self._stream(part.name), device=self.device)
        center, deviation = SIZES[kind_of(weight)]
        if deviation is None:
            deviation = (3 if weight.axes[0] == "vocab" else 1) / part.shape[-1] ** 0.5
        if weight.positive:
            values.clamp_(-FURTHEST, FURTHEST)
        return values.mul_(deviation).add_(center)

    def _table(self, table: Table, name: str) -> Tensor:
        return distinct(table, self._stream(name))

    def _stream(self, name: str) -> torch.Generator:
        return torch.Generator(self.device).manual_seed(digest(self.seed, name))


def kind_of(weight: Weight) -> str:
    """How `make_tiny` would fill it; but a router's bias, which is not trained, is small everywhere, since a large one
    sends every token to the same few experts."""
    if weight.init is None and weight.exact and weight.frozen and len(weight.shape) == 1:
        return "score_bias"
    return weight.init or rule(weight)


SIZES: dict[str, tuple[float, float | None]] = {
    "norm": (1, 0.2),
    "bias": (0, 0.5),
    "score_bias": (0, 0.1),
    "dt_bias": (-3.5, 1),
    "A_log": (0.5, 0.7),
    "input_scale": (0.012, 0.0024),
    "cache_scale": (0.01, 0.002),
    "matrix": (0, None),
    "vocab": (0, None),
}
"""Mean and deviation of each kind of weight, as `tiny.INITS` has them; None: by the number of columns."""


def for_others(shards: RandomShards) -> Iterator[tuple[str, Tensor]]:
    """Every tensor, for a class of vLLM's own. Beside FP8 experts, power-of-two scales come in float32, as released
    checkpoints with FP8 experts have them: vLLM reads an e8m0 scale of such an expert as a whole number (its issue
    43416)."""
    codes = (name for name in shards.experts if name.endswith(".weight"))
    eight = any(shards.tensors[name].dtype == "F8_E4M3" for name in codes)
    for name, stored in shards.tensors.items():
        values = shards.read(name)
        yield name, values.float() if eight and stored.dtype == "F8_E8M0" else values


class RandomLoader(BaseModelLoader):  # type: ignore[misc]
    """Registered under FORMAT where this module is imported."""

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """One tensor after the other."""
        shards = RandomShards(Path(model_config.model), torch.device(current_platform.device_type))
        if hasattr(model, "load_shards"):
            model.load_shards(shards)
        else:
            model.load_weights(for_others(shards))
        shards.close()


register_model_loader(FORMAT)(RandomLoader)
