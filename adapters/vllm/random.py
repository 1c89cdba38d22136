"""`load_format="unified_random"`: a model of any size from its config.json alone, for benchmarks and full-width tests.

Every tensor is drawn when it is asked for, on the device, from a stream of its own; a class of vLLM's own that reads
the same checkpoint names gets the same values.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

from unified_models.checkpoint.loading import architecture, build
from unified_models.checkpoint.names import Names
from unified_models.checkpoint.shards import DTYPE_NAMES, Shards, Stored
from unified_models.tiny import digest, rule
from unified_models.weight import Weight

FORMAT = "unified_random"


class RandomShards(Shards):
    """The tensors of a model that its config.json describes, bfloat16 or, of float32 parameters, float32.

    ValueError: a folder without a config.json that an architecture reads, or one whose model has tables or scales.
    """

    def __init__(self, folder: Path, device: torch.device, seed: int = 0) -> None:
        architecture(folder)
        with torch.device("meta"):
            model = build(folder)
        self.parts: dict[str, tuple[Weight, torch.Size, torch.dtype]] = {}
        stored, self.device, self.seed = {}, device, seed
        for part in Names.of(model).parts:
            weight, name = part.owner, part.name
            if not isinstance(weight, Weight) or kind_of(weight) not in SIZES:
                raise ValueError(f"{folder}: there are no random values for {name}")
            if weight.default is None:
                dtype = torch.float32 if weight.exact else torch.bfloat16
                size = part.shape.numel() * dtype.itemsize
                self.parts[name] = weight, part.shape, dtype
                stored[name] = Stored(name, folder, DTYPE_NAMES[dtype], tuple(part.shape), size)
        super().__init__(folder, stored, ())

    def read(self, name: str) -> Tensor:
        weight, shape, dtype = self.parts[name]
        generator = torch.Generator(self.device).manual_seed(digest(self.seed, name))
        values = torch.randn(shape, generator=generator, device=self.device)
        center, deviation = SIZES[kind_of(weight)]
        if deviation is None:
            deviation = (3 if weight.axes[0] == "vocab" else 1) / shape[-1] ** 0.5
        return (center + deviation * values).to(dtype)


def kind_of(weight: Weight) -> str:
    """How `make_tiny` would fill it."""
    return weight.init or rule(weight)


SIZES: dict[str, tuple[float, float | None]] = {
    "norm": (1, 0.2),
    "bias": (0, 0.5),
    "score_bias": (0, 0.1),
    "dt_bias": (-3.5, 1),
    "A_log": (0.5, 0.7),
    "matrix": (0, None),
    "vocab": (0, None),
}
"""Mean and deviation of each kind of weight, as `tiny.INITS` has them; None: by the number of columns."""


class RandomLoader(BaseModelLoader):  # type: ignore[misc]
    """Registered under FORMAT where this module is imported."""

    def download_model(self, model_config: Any) -> None:
        """There is nothing to download."""

    def load_weights(self, model: Any, model_config: Any) -> None:
        """One tensor after the other."""
        shards = RandomShards(Path(model_config.model), torch.device("cuda"))
        if hasattr(model, "load_shards"):
            model.load_shards(shards)
        else:
            model.load_weights((name, shards.read(name)) for name in shards.tensors)


register_model_loader(FORMAT)(RandomLoader)
