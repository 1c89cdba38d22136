"""Weights that vLLM hands over, into our own: a checkpoint's tensors first, then masters as well, always in place."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from unified_models.checkpoint.loading import fill
from unified_models.checkpoint.match import match
from unified_models.checkpoint.names import Names
from unified_models.checkpoint.quantized import PLAIN
from unified_models.checkpoint.shards import DTYPE_NAMES, Shards, Stored
from unified_models.checkpoint.sync import update
from unified_models.model import LanguageModel

WHOLE = ("I64", "I32")


class Given(Shards):
    """Tensors at hand, behind the interface of a folder's."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.held = dict(tensors)
        where = Path("tensors given to vLLM")
        stored = {
            name: Stored(name, where, DTYPE_NAMES[t.dtype], tuple(t.shape), t.nbytes)
            for name, t in self.held.items()
        }
        super().__init__(where, stored, ())

    def read(self, name: str) -> Tensor:
        return self.held[name]


def load(
    model: LanguageModel,
    tensors: Iterable[tuple[str, Tensor]] | Shards,
    numerics: str,
    filled: bool,
    device: torch.device,
) -> set[str]:
    """Fill the model, or replace what it holds; the names that were given.

    The first time, and whenever packed tensors come: as a checkpoint, formats by the tensors, without masters. Later on
    plain tensors are masters, as a trainer holds them (`checkpoint.update`), all of them or some.
    Raises ValueError listing every problem before the first byte changes.
    """
    given = tensors if isinstance(tensors, Shards) else Given(tensors)
    if filled and all(stored.dtype in (*PLAIN, *WHOLE) for stored in given.tensors.values()):
        update(model, ((name, given.read(name)) for name in given.tensors), strict=False)
        return set(given.tensors)
    found = match(Names.of(model), given, {})
    fill(model, given, found, device, numerics, weights="packed", progress=False)
    return set(given.tensors)


def still_missing(model: LanguageModel, waiting: set[str], given: set[str]) -> set[str]:
    """The names of an update that are to come, after `given` came; waiting: those before it, none where it begins."""
    names = Names.of(model)
    arrived = {part.name for name in given if (part := names.by_name.get(name)) is not None}
    return (waiting or {part.name for part in names.parts}) - arrived
