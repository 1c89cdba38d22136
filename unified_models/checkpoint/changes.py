"""What the packing rule did to a file's values."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.checkpoint.quantized import LAYOUTS
from unified_models.formats import Format


@dataclass(frozen=True)
class Change:
    """A tensor of which `changed` of `blocks` scale blocks (plain formats: values) came back with other values.

    largest: the largest |new - old| / max(|new|, |old|) of its values.
    """

    name: str
    format: str
    blocks: int
    changed: int
    largest: float

    def __str__(self) -> str:
        share = f"{self.changed} of {self.blocks} blocks"
        return f"{self.name} ({self.format}): {share}, by up to {self.largest:.3g} of the value"


def compare(name: str, format: Format, old: Tensor, new: Tensor) -> Change | None:
    """None where all float32 values are equal. A NaN equals a NaN."""
    different = (old != new) & ~(old.isnan() & new.isnan())
    if not different.any():
        return None
    layout = LAYOUTS.get(format.name)
    rows, columns = (layout.rows, layout.columns) if layout else (1, 1)
    grid = different.reshape(-1, different.shape[-1] if different.ndim else 1)
    grid = F.pad(grid, (0, -grid.shape[1] % columns, 0, -grid.shape[0] % rows))
    blocks = grid.reshape(grid.shape[0] // rows, rows, -1, columns).any(3).any(1)
    a, b = old[different].double(), new[different].double()
    largest = ((a - b).abs() / torch.maximum(a.abs(), b.abs())).max()
    return Change(name, format.name, blocks.numel(), int(blocks.sum()), float(largest))
