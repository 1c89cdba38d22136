"""Writing a checkpoint: official names, each weight in the format that checkpoints hold it in, streamed."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from unified_models.checkpoint.config_files import CONFIG, QUANT_CONFIG, write_config
from unified_models.checkpoint.match import FORMATS_KEY
from unified_models.checkpoint.names import Names, Part
from unified_models.checkpoint.quantized import LAYOUTS, pending
from unified_models.checkpoint.shards import INDEX, SINGLE, Pending, write_shard
from unified_models.checkpoint.sync import values_of
from unified_models.formats import Format, Packed
from unified_models.model import LanguageModel
from unified_models.weight import Table, Weight

Values = Callable[[Part], Tensor]


@torch.no_grad()
def save(
    model: LanguageModel,
    folder: str | Path,
    *,
    max_shard_bytes: int = 5_000_000_000,
    masters: bool = False,
    overwrite: bool = False,
    parts: Sequence[Part] | None = None,
    values: Callable[[Part], Tensor] = values_of,
) -> None:
    """Write a checkpoint folder that `load`, transformers and vLLM read.

    The folder appears whole or not at all: everything is written beside it and renamed.

    Args:
        max_shard_bytes: most bytes of tensors in one file (a weight and its scale stay together).
        masters: write float32 masters instead of packed values, to go on training from; `load` gives them their
            formats back, other programs see float32.
        overwrite: replace the checkpoint of a folder that is not empty; its other files stay.
        parts, values: what to write, and where its master values come from, if not from the model's own memory: packed
            bytes are derived from them.

    Raises ValueError for a folder that holds files (unless overwrite), when there are no masters to write, or for a
    model of which other processes hold a part (adapters.fsdp.export writes the whole); RuntimeError when a master is
    newer than its packed bytes.
    """
    folder = Path(folder).resolve()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: is a file, not a folder to save into")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        held = ", ".join(sorted(path.name for path in folder.iterdir())[:4])
        raise ValueError(f"{folder}: holds files already ({held}); pass overwrite=True to replace")
    if max_shard_bytes <= 0:
        raise ValueError(f"max_shard_bytes must be positive, got {max_shard_bytes}")
    parts = whole_parts(model, folder) if parts is None else parts
    for part in parts:
        if masters and isinstance(part.owner, Weight) and part.owner.master is None:
            raise ValueError(f"masters=True, but {part.path} holds packed bytes only")

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        write_config(partial, model.config.to_json())
        _write_shards(partial, parts, values, masters, max_shard_bytes)
        _move_into_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def whole_parts(model: LanguageModel, folder: Path) -> Sequence[Part]:
    """Every tensor of the model; ValueError where other processes hold some, or a part of some."""
    export = "call adapters.fsdp.export(model, folder, parallel), which writes the whole, on all processes"
    for path, weight in model.weights():
        if weight.part_of_stack:
            last = weight.first + weight.shape[0] - 1
            raise ValueError(
                f"{folder}: {path} holds experts {weight.first} to {last} of {weight.stack}; {export}"
            )
        if weight.sharding is not None and weight.sharding.group is not None:
            raise ValueError(f"{folder}: the master of {path} is cut over processes; {export}")
    return Names.of(model).parts


def _write_shards(
    folder: Path, parts: Iterable[Part], values: Values, masters: bool, most: int
) -> None:
    shards: list[list[Pending]] = [[]]
    formats: list[dict[str, str]] = [{}]
    filled = 0
    for part in parts:
        tensors = list(_tensors(part, values, masters))
        size = sum(tensor.size for tensor in tensors)
        if shards[-1] and filled + size > most:
            shards.append([])
            formats.append({})
            filled = 0
        shards[-1] += tensors
        filled += size
        if masters and isinstance(part.owner, Weight):
            formats[-1][part.name] = part.owner.stored.name

    count = len(shards)
    weight_map: dict[str, str] = {}
    for number, (tensors, packed) in enumerate(zip(shards, formats, strict=True), 1):
        file = SINGLE if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"
        write_shard(folder / file, tensors, {FORMATS_KEY: json.dumps(packed)} if packed else {})
        weight_map |= {tensor.name: file for tensor in tensors}
    if count > 1:
        total = sum(tensor.size for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _tensors(part: Part, values: Values, masters: bool) -> Iterator[Pending]:
    owner = part.owner
    if masters or isinstance(owner, Table):
        dtype = torch.int64 if isinstance(owner, Table) else torch.float32
        yield Pending(part.name, dtype, part.shape, lambda: values(part).to(dtype))
    else:
        owner.require_committed()  # before anything is written
        yield from pending(
            part.name, owner.stored, part.shape, lambda: _packed(part, owner, values)
        )


def _packed(part: Part, owner: Weight, values: Values) -> Packed:
    """The packed bytes of one part, in the format that checkpoints hold; `settled`, unless a serving process writes
    the file's own bytes."""
    stored = owner.stored
    if owner.format is not stored or values is not values_of:
        packed = stored.pack(values(part))
    else:
        packed = owner().packed
        if part.index is not None:
            packed = {name: values[part.index] for name, values in packed.items()}
    return packed if owner.master is None else settled(stored, packed, part.shape)


def settled(stored: Format, packed: Packed, shape: torch.Size) -> Packed:
    """The bytes that a file gets for these.

    One value may have several (code, scale) pairs: with power-of-two scales, where rounding took a block's maximum
    down to half the range; under four-over-six, where a block lies on both grids. The file gets the pair that a load
    arrives at, so that load and save change no byte; and the packed bytes where that would change a value.
    """
    if stored.name not in LAYOUTS:
        return packed
    unpacked = stored.unpack(packed, shape)
    again = stored.pack(unpacked)
    return again if torch.equal(stored.unpack(again, shape), unpacked) else packed


def _move_into_place(partial: Path, folder: Path) -> None:
    """Rename a finished folder over an empty one, or swap it with one that holds an older checkpoint."""
    if not folder.exists() or not any(folder.iterdir()):
        os.replace(partial, folder)
        return
    for path in folder.iterdir():
        if path.name not in (CONFIG, QUANT_CONFIG, INDEX) and path.suffix != ".safetensors":
            copy = shutil.copytree if path.is_dir() else shutil.copy2
            copy(path, partial / path.name)
    old = folder.with_name(f"{partial.name}.old")
    os.replace(folder, old)
    os.replace(partial, folder)
    shutil.rmtree(old)
