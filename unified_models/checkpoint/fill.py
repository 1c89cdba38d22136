"""Filling the parts of a model from a checkpoint, one tensor at a time, and noting what packing changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from unified_models.checkpoint.changes import Change, compare
from unified_models.checkpoint.match import Source
from unified_models.checkpoint.quantized import to_packed
from unified_models.checkpoint.shards import Shards
from unified_models.formats import Packed
from unified_models.progress import Bar, bar
from unified_models.weight import Table, Weight


@dataclass(frozen=True)
class Held:
    """What a file holds of one part. values: dequantised float32, or the plain tensor in its own dtype.

    packed: the file's own codes and scales; None for a plain tensor.
    """

    source: Source
    values: Tensor
    packed: Packed | None

    @classmethod
    def read(cls, shards: Shards, source: Source, device: torch.device) -> "Held":
        assert source.format is not None
        tensor = shards.read(source.tensor.name).to(device)
        if source.scale is None:
            return cls(source, tensor, None)
        scale = shards.read(source.scale.name).to(device)
        packed = to_packed(source.tensor.name, tensor, scale)
        return cls(source, source.format.unpack(packed, source.part.shape), packed)

    def rounded(self) -> Tensor:
        """Master values: bf16 of what was quantised, plain values as they are."""
        return self.values if self.packed is None else self.values.to(torch.bfloat16)

    def change(self, packed: Packed) -> Change | None:
        """How the values of `packed`, which the packing rule made of these, differ from the file's."""
        format = self.source.format
        assert format is not None
        new = format.unpack(packed, self.source.part.shape)
        return compare(self.source.tensor.name, format, self.values.float(), new)


def may_change(source: Source) -> bool:
    """Whether packing can give this tensor other values than the file's. Masters are not packed values."""
    if source.format is None or source.format.name == "float32" or source.master:
        return False
    return source.scale is not None or source.tensor.dtype != "BF16"


@torch.no_grad()
def repacked(shards: Shards, source: Source) -> Change | None:
    """What loading would do to the values of one part; None: nothing. Raises ValueError as a load would."""
    owner = source.part.owner
    if isinstance(owner, Table):
        owner.check(shards.read(source.tensor.name), source.tensor.name)
        return None
    if not may_change(source):
        return None
    assert source.format is not None
    held = Held.read(shards, source, torch.device("cpu"))
    return held.change(source.format.pack(held.rounded()))


@dataclass
class Filler:
    """Fills parts on one device. keep_masters: False leaves the file's packed bytes only."""

    shards: Shards
    device: torch.device
    keep_masters: bool
    changed: list[Change] = field(default_factory=list)

    @torch.no_grad()
    def fill(self, sources: Sequence[Source], show_progress: bool) -> None:
        """Fill every part; those of one stacked Weight are neighbours in `sources`."""
        size = sum(source.size for source in sources)
        with bar("loading", size, of_bytes=True, wanted=show_progress) as shown:
            for _, group in groupby(sources, key=lambda source: source.part.path):
                parts = list(group)
                owner = parts[0].part.owner
                if isinstance(owner, Table):
                    self._fill_table(owner, parts[0])
                    shown.advance(parts[0].size)
                else:
                    self._fill_weight(owner, parts, shown)

    def _fill_table(self, table: Table, source: Source) -> None:
        values = self.shards.read(source.tensor.name)
        table.check(values, source.tensor.name)
        table.data = values.to(self.device, torch.int64, copy=True)

    def _fill_weight(self, weight: Weight, sources: Sequence[Source], shown: Bar) -> None:
        if not self.keep_masters:
            weight.drop_master()
        elif weight.master is not None and weight.master.device != self.device:
            empty = torch.empty(weight.shape, dtype=torch.float32, device=self.device)
            weight.master = nn.Parameter(empty, requires_grad=not weight.frozen)
        packed: Packed = {}
        for source in sources:
            piece, index = self._fill_part(weight, source), source.part.index
            shown.advance(source.size)
            if index is None:
                packed = piece
                continue
            for name, values in piece.items():
                if name not in packed:
                    packed[name] = values.new_empty((len(sources), *values.shape))
                packed[name][index].copy_(values)
        weight.keep(packed)

    def _fill_part(self, weight: Weight, source: Source) -> Packed:
        """Fill the master of one part; its packed bytes."""
        held = Held.read(self.shards, source, self.device)
        deployed = weight.format is source.format
        if weight.master is None:
            packed = held.packed or weight.format.pack(held.values)
        else:
            index = source.part.index
            master = weight.master if index is None else weight.master[index]
            master.copy_(held.rounded() if deployed else held.values)
            packed = weight.format.pack(master)
        if deployed and packed is not held.packed and may_change(source):
            change = held.change(packed)
            self.changed.extend([change] if change else [])
        return packed
