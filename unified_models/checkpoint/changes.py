"""What the packing rule did to a file's values."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.checkpoint.quantized import LAYOUTS
from unified_models.formats import Format


@dataclass(frozen=True)
class Change:
    """A tensor of which `changed` of `blocks` blocks came back with other values. A block is what shares a scale: 128
    x 128, 16 or 32 values, or the whole; of plain formats, one value.

    largest: the largest |new - old|, as a share of the largest |value| of its block.
    """

    name: str
    format: str
    blocks: int
    changed: int
    largest: float

    def __str__(self) -> str:
        share = f"{self.changed} of {self.blocks} blocks"
        return f"{self.name} ({self.format}): {share}, by up to {self.largest:.3g} of a block's largest value"


def told(changes: Sequence[Change], most: int = 12) -> list[str]:
    """Lines about changes: the total of each format, then each tensor, up to `most` of them."""
    lines = []
    for name in sorted({change.format for change in changes}):
        of = [change for change in changes if change.format == name]
        changed, blocks = sum(c.changed for c in of), sum(c.blocks for c in of)
        lines.append(
            f"{len(of)} {name} tensors, {changed} of {blocks} blocks, "
            f"by up to {max(c.largest for c in of):.3g} of a block's largest value"
        )
    lines += [str(change) for change in changes[:most]]
    return lines + ([f"... {len(changes) - most} more tensors"] if len(changes) > most else [])


def compare(name: str, format: Format, old: Tensor, new: Tensor) -> Change | None:
    """None where all float32 values are equal. A NaN equals a NaN."""
    if not ((old != new) & ~(old.isnan() & new.isnan())).any():
        return None
    layout = LAYOUTS.get(format.name)
    size = layout.block(old.shape[-2], old.shape[-1]) if layout else (1, 1)
    difference = _largest((new.double() - old.double()).abs(), size)
    value = torch.maximum(_largest(old.double().abs(), size), _largest(new.double().abs(), size))
    changed = difference != 0
    share = (difference[changed] / value[changed]).max()
    return Change(name, format.name, difference.numel(), int(changed.sum()), float(share))


def _largest(values: Tensor, size: tuple[int, int]) -> Tensor:
    """The largest value of each block of `size`; blocks at the edges may be partial."""
    rows, columns = size
    grid = values.reshape(-1, values.shape[-1] if values.ndim else 1)
    grid = F.pad(grid, (0, -grid.shape[1] % columns, 0, -grid.shape[0] % rows))
    return grid.reshape(grid.shape[0] // rows, rows, -1, columns).amax((1, 3))
