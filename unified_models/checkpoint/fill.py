"""Filling the parts of a model from a checkpoint, one tensor at a time, and noting what packing changed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from torch import Tensor, nn

from unified_models.checkpoint.changes import Change, compare
from unified_models.checkpoint.match import Source
from unified_models.checkpoint.names import Part
from unified_models.checkpoint.quantized import LAYOUTS, to_packed
from unified_models.checkpoint.shards import Shards
from unified_models.formats import Packed
from unified_models.progress import Bar, bar
from unified_models.weight import Table, Weight, check_scales


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
        if not source.scales:
            source.part.owner.check(tensor, source.tensor.name)
            return cls(source, tensor.reshape(source.part.shape), None)
        scales = {
            piece: (stored.name, shards.read(stored.name).to(device))
            for piece, stored in source.scales.items()
        }
        packed = to_packed(LAYOUTS[source.format.name], tensor, scales)
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
    return bool(source.scales) or source.tensor.dtype != "BF16"


def read_input_scale(shards: Shards, source: Source) -> Tensor:
    """float32 []: the scale of the input. Raises ValueError naming it if it is no finite number above 0."""
    assert source.input_scale is not None
    scale = shards.read(source.input_scale.name).reshape(())
    check_scales(scale, source.input_scale.name)
    return scale


@torch.no_grad()
def repacked(shards: Shards, source: Source) -> Change | None:
    """What loading would do to the values of one part; None: nothing. Raises ValueError as a load would."""
    owner = source.part.owner
    if isinstance(owner, Table):
        owner.check(shards.read(source.tensor.name), source.tensor.name)
        return None
    if source.input_scale is not None:
        read_input_scale(shards, source)
    if not may_change(source):
        if owner.positive:
            owner.check(shards.read(source.tensor.name), source.tensor.name)
        return None
    assert source.format is not None
    held = Held.read(shards, source, torch.device("cpu"))
    return held.change(source.format.pack(held.rounded()))


@dataclass
class Filler:
    """Fills parts on one device.

    keep: "master" leaves masters and what they pack to; "packed" the same packed bytes without masters; "file" the
    file's own packed bytes.
    """

    shards: Shards
    device: torch.device
    keep: str
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

    @torch.no_grad()
    def use_defaults(self, parts: Sequence[Part]) -> None:
        """Give each part that the checkpoint lacks the value that this means."""
        for part in parts:
            assert isinstance(part.owner, Weight) and part.owner.default is not None
            self._hold(part.owner, torch.full(part.owner.shape, part.owner.default))

    def _hold(self, weight: Weight, values: Tensor) -> None:
        """The whole of a float32 weight."""
        values = values.to(self.device, torch.float32)
        if self.keep == "master":
            weight.master = nn.Parameter(values, requires_grad=not weight.frozen)
        else:
            weight.drop_master()
        weight.keep(weight.format.pack(values))

    def _fill_table(self, table: Table, source: Source) -> None:
        values = self.shards.read(source.tensor.name)
        table.check(values, source.tensor.name)
        table.data = values.to(self.device, torch.int64, copy=True)

    def _fill_weight(self, weight: Weight, sources: Sequence[Source], shown: Bar) -> None:
        if self.keep != "master":
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
        if weight.input_scale is not None:
            scales = [read_input_scale(self.shards, source) for source in sources]
            self._hold(weight.input_scale, torch.stack(scales).view(weight.input_scale.shape))

    def _fill_part(self, weight: Weight, source: Source) -> Packed:
        """Fill the master of one part; its packed bytes."""
        held = Held.read(self.shards, source, self.device)
        deployed = weight.format is source.format
        if self.keep == "file" and held.packed is not None:
            packed = held.packed
        else:
            values = held.rounded() if deployed else held.values
            if weight.master is not None:
                index = source.part.index
                master = weight.master if index is None else weight.master[index]
                values = master.copy_(values)
            packed = weight.format.pack(values)
        if deployed and packed is not held.packed and may_change(source):
            change = held.change(packed)
            self.changed.extend([change] if change else [])
        return packed
