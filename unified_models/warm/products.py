"""Which products of a model DeepGEMM multiplies, from its config.json and the headers of its tensors."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from unified_models import registry
from unified_models.checkpoint.config_files import CONFIG
from unified_models.checkpoint.implied import bind_implied
from unified_models.checkpoint.loading import bind_formats, build, match_folder
from unified_models.checkpoint.names import Names
from unified_models.checkpoint.shards import open_shards
from unified_models.config import load_json
from unified_models.formats.fp4 import NVFP4
from unified_models.formats.weights import BlockFP8, TensorFP8
from unified_models.model import LanguageModel
from unified_models.ops.linear import narrow
from unified_models.weight import Weight

FLOATS = (torch.bfloat16, torch.float32)
"""What DeepGEMM writes."""


@dataclass(frozen=True)
class Product:
    """x @ w.T with one shape of weight: DeepGEMM compiles for N, K and the dtypes, and for tiles that M asks for.

    groups: matrices [N, K] in one launch, x [M, groups, K]; 1: x [M, K]. fp8: e4m3 bytes and their scales, else
    bfloat16. dtype: of the result.
    """

    N: int
    K: int
    dtype: torch.dtype
    fp8: bool = False
    groups: int = 1

    def __str__(self) -> str:
        stack = f"{self.groups} x " if self.groups > 1 else ""
        kind = "fp8" if self.fp8 else "bfloat16"
        return f"{stack}{self.N} x {self.K}, {kind} to {str(self.dtype).removeprefix('torch.')}"


def products(model: LanguageModel) -> list[Product]:
    """The distinct products of a model's linears that DeepGEMM multiplies where it is installed, the largest first.

    The weights may be on meta; their formats must be known. The result's dtype is an argument of each call, which no
    weight tells: of bfloat16 weights both are here, and an embedding counts as a linear, since a tied one is.
    """
    found = dict.fromkeys(product for _, weight in model.weights() for product in of_weight(weight))
    return sorted(found, key=lambda p: p.groups * p.N * p.K, reverse=True)


def of_weight(weight: Weight) -> Iterator[Product]:
    """The products that a linear with this weight may ask DeepGEMM for; none of experts, which are stacks of matrices,
    nor of what `narrow` multiplies otherwise."""
    fmt, shape = weight.format, weight.shape
    if len(shape) != 2:
        return
    N, K = shape[0] // weight.groups, shape[1]
    if isinstance(fmt, BlockFP8):
        if narrow.whole_blocks(fmt, shape, weight.groups):
            yield Product(N, K, torch.bfloat16, fp8=True, groups=weight.groups)
        return
    if fmt.name == "float32" or isinstance(fmt, TensorFP8):
        return
    if narrow.large(torch.empty(N, K, device="meta")):
        # A global scale multiplies the float32 sum, which is rounded after that.
        dtypes = FLOATS[1:] if isinstance(fmt, NVFP4) else FLOATS
        yield from (Product(N, K, dtype) for dtype in dtypes)


def described(path: Path) -> LanguageModel:
    """The model of a checkpoint folder or of a config.json of any name, on meta: formats as the headers of its tensors
    have them, or as the config implies them where there are none.

    ValueError naming the file: no config that an architecture reads, or tensors that do not fit it.
    """
    with torch.device("meta"):
        if path.is_file() and path.name != CONFIG:
            return _configured(path)
        folder = path.parent if path.is_file() else path
        model = build(folder)
        bind_implied(model)
        if any(folder.glob("*.safetensors")):
            _bind_stored(model, folder)
    return model


def _bind_stored(model: LanguageModel, folder: Path) -> None:
    shards = open_shards(folder)
    found = match_folder(Names.of(model), shards)
    shards.close()
    if problems := found.problems():
        raise ValueError(f"{folder}: the checkpoint does not fit its config.json: {problems[0]}")
    bind_formats(model, found)


def _configured(file: Path) -> LanguageModel:
    raw = load_json(file)
    if "model_type" not in raw:
        raise ValueError(f"{file}: missing key 'model_type'")
    module = registry.find(raw["model_type"])
    model: LanguageModel = module.Model(module.Config.from_json(raw, source=str(file)))
    model.name_parts()
    bind_implied(model)
    return model
