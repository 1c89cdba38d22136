"""A kernel's own form of a weight's bytes, kept as long as they are, at an address that never moves: a recorded CUDA
graph asks nobody where its operands lie."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Commits = tuple[int, int]


class Operands:
    """What was built of one weight, by what built it."""

    def __init__(self) -> None:
        self.kept: dict[Callable[[Any], Any], tuple[Commits, Any]] = {}

    def of(self, reading: Any, commits: Commits, build: Callable[[Any], Any]) -> Any:
        """`build(reading)`, built once for each number of commits, in the storage of the one before."""
        known = self.kept.get(build)
        if known is not None and known[0] == commits:
            return known[1]
        # A tensor that is made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            made = build(reading)
            made = made if known is None else in_place(known[1], made)
        self.kept[build] = (commits, made)
        return made

    def refresh(self, reading: Any, commits: Commits) -> None:
        """Build anew what is there now, not when a forward asks."""
        for build in list(self.kept):
            self.of(reading, commits, build)

    def clear(self) -> None:
        self.kept.clear()


def in_place(old: Any, new: Any) -> Any:
    """`new`, in the storage of `old` where that is of its shape, dtype and device: tensors and dataclasses of them."""
    if isinstance(old, Tensor) and isinstance(new, Tensor):
        same = (old.shape, old.dtype, old.device) == (new.shape, new.dtype, new.device)
        if not same:
            return new
        if old.data_ptr() != new.data_ptr():
            old.copy_(new)
        return old
    if dataclasses.is_dataclass(new) and type(old) is type(new):
        names = [field.name for field in dataclasses.fields(new)]
        parts = {name: in_place(getattr(old, name), getattr(new, name)) for name in names}
        return dataclasses.replace(new, **parts)  # type: ignore[type-var]
    return new
