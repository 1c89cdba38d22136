"""What two sides must share for their bits to be equal. Both print theirs; a mismatch is refused with both values."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch

from unified_models import registry
from unified_models.model import LanguageModel
from unified_models.ops import backend
from unified_models.ops.logprob import check_provider


@dataclass(frozen=True)
class Fingerprint:
    """One side of a comparison: the contract it computes, and what computes it."""

    contract: str
    """hash of the model file, the config, numerics, and every weight's and slot's format"""
    numerics: str
    weights: str
    """master: packed from masters by the packing rule; file: the file's own bytes"""
    backend: str
    chip: str
    """what torch and MKL choose their kernels by: a CPU's capability, a GPU's name and generation"""
    logprob: str
    """provider of log_softmax's order of summation"""
    libraries: dict[str, str]
    kernels: dict[str, str]
    """file -> hash, for each file that defines an operator"""

    @classmethod
    def of(cls, model: LanguageModel, provider: str = "torch_row") -> "Fingerprint":
        """The fingerprint of a loaded model in this process, and of the sampler's log_softmax."""
        check_provider(provider)
        device = next((buffer.device for buffer in model.buffers()), torch.device("cpu"))
        return cls(
            contract=contract(model),
            numerics=model.numerics,
            weights=model.weights_from,
            backend=device.type,
            chip=backend.chip(device),
            logprob=provider,
            libraries=backend.libraries(device),
            kernels=backend.sources(),
        )

    def require_same(self, other: "Fingerprint") -> None:
        """ValueError that lists each field in which the two differ, with both values."""
        lines = []
        for name, mine in dataclasses.asdict(self).items():
            theirs = dataclasses.asdict(other)[name]
            if isinstance(mine, dict):
                keys = sorted(
                    k for k in mine.keys() | theirs.keys() if mine.get(k) != theirs.get(k)
                )
                lines += [f"{name}[{k}]: {mine.get(k)} here, {theirs.get(k)} there" for k in keys]
            elif mine != theirs:
                lines.append(f"{name}: {mine} here, {theirs} there")
        if lines:
            raise ValueError("the two sides would not compute the same bits: " + "; ".join(lines))

    def to_json(self) -> str:
        """One line, to print or to send to the other side."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "Fingerprint":
        """The inverse of `to_json`."""
        return cls(**json.loads(text))


def contract(model: LanguageModel) -> str:
    """16 hex digits over everything about the model that chooses bits, apart from the weights' values."""
    file = registry.find(model.file().rpartition(".")[2]).__file__
    assert file is not None
    digest = hashlib.sha256(Path(file).read_bytes())
    digest.update(json.dumps(model.config.to_json(), sort_keys=True, default=str).encode())
    for path, weight in model.weights():
        digest.update(f"{path} {tuple(weight.shape)} {weight.format.name}\n".encode())
    for path, slot in model.slots().items():
        digest.update(f"{path} {slot.layout()}\n".encode())
    return digest.hexdigest()[:16]
