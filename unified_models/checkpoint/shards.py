"""Safetensors in and out: which files a checkpoint has, what their headers promise, one tensor at a time.

Headers are read and checked here, by the format's own definition (8 bytes of length, little-endian, then JSON, then
the tensors without holes), so that what is said about a broken file does not depend on a library's version. The
tensors themselves are read through the safetensors library, which maps the file: a page counts only once touched.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from unified_models.config import load_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
HEADER_LIMIT = 100_000_000  # bytes; the safetensors library refuses more

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """What a header says of one tensor. size in bytes."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    size: int


@dataclass
class Shards:
    """The tensors of a checkpoint folder, every header checked.

    stray: files of the folder that are not part of the checkpoint. unlisted: tensors that a shard holds and the index
    does not name. metadata: `__metadata__` of each file.
    """

    folder: Path
    tensors: dict[str, Stored]
    files: tuple[str, ...]
    stray: tuple[str, ...] = ()
    unlisted: tuple[str, ...] = ()
    metadata: tuple[dict[str, str], ...] = ()
    _open: tuple[Path, Any] | None = field(default=None, repr=False)

    def read(self, name: str) -> Tensor:
        """The tensor in the file's dtype, on the CPU; it may be a view of the mapped file."""
        file = self.tensors[name].file
        if self._open is None or self._open[0] != file:
            self._open = None  # unmap one file before the next is mapped
            self._open = (file, safe_open(file, framework="pt", device="cpu"))
        tensor: Tensor = self._open[1].get_tensor(name)
        return tensor

    def close(self) -> None:
        """Let go of the mapped file."""
        self._open = None


def open_shards(folder: Path, ignore_index: bool = False) -> Shards:
    """The checkpoint in a folder. Nothing but headers is read.

    The index decides which files are read; without one, `model.safetensors` is. ignore_index: read every
    *.safetensors of the folder instead, by what their headers say.
    Raises ValueError naming the file: no folder, no checkpoint, a missing or stale or broken file, a tensor missing
    from its shard, or (ignore_index) in two files.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    present = sorted(path.name for path in folder.glob("*.safetensors"))
    if ignore_index:
        if not present:
            raise ValueError(f"{folder}: holds no *.safetensors file")
        return _merged(folder, present)
    if (folder / INDEX).exists():
        return _indexed(folder, present)
    if SINGLE in present:
        shards = _merged(folder, [SINGLE])
        shards.stray = tuple(name for name in present if name != SINGLE)
        return shards
    others = f"; it holds {some(present)}, and no index that names them" if present else ""
    raise ValueError(f"{folder}: neither {INDEX} nor {SINGLE} is there{others}")


def _merged(folder: Path, files: Sequence[str]) -> Shards:
    tensors: dict[str, Stored] = {}
    metadata: list[dict[str, str]] = []
    for file in files:
        header, extra = read_header(folder / file)
        metadata.append(extra)
        for name, stored in header.items():
            if name in tensors:
                raise ValueError(f"{folder}: {name} is in {tensors[name].file.name} and in {file}")
            tensors[name] = stored
    return Shards(folder, tensors, tuple(files), metadata=tuple(metadata))


def _indexed(folder: Path, present: Sequence[str]) -> Shards:
    index = folder / INDEX
    weight_map = load_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: no 'weight_map' of tensor names to file names")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index}: {name} is said to be in {file!r}, not a file name")
    files = sorted(set(weight_map.values()))
    stray = tuple(name for name in present if name not in files)
    missing = [file for file in files if file not in present]
    if missing:
        raise ValueError(_missing_files(index, files, missing, stray))

    headers: dict[str, dict[str, Stored]] = {}
    metadata: list[dict[str, str]] = []
    for file in files:
        headers[file], extra = read_header(folder / file)
        metadata.append(extra)
    lost = [f"{name} ({file})" for name, file in weight_map.items() if name not in headers[file]]
    if lost:
        raise ValueError(
            f"{index}: the index is stale: {len(lost)} tensors are not in the shard it names: "
            f"{some(lost)}"
        )
    tensors = {name: headers[file][name] for name, file in weight_map.items()}
    unlisted = tuple(
        f"{name} ({file})"
        for file, header in headers.items()
        for name in header
        if weight_map.get(name) != file
    )
    return Shards(folder, tensors, tuple(files), stray, unlisted, tuple(metadata))


def _missing_files(
    index: Path, files: Sequence[str], missing: Sequence[str], stray: Sequence[str]
) -> str:
    said = (
        f"{index}: names {len(files)} files, of which {len(missing)} do not exist: {some(missing)}"
    )
    if stray:
        return (
            f"{said}. The folder holds {len(stray)} files that it does not name ({some(stray)}): "
            "the index is stale. Put the right one there, or pass ignore_index=True to read every "
            "*.safetensors of the folder"
        )
    return f"{said}. Download them again; if they were merged or removed, the index is stale"


def read_header(file: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Tensors by name, and the metadata, of one safetensors file whose size and layout are as they must be."""
    size = file.stat().st_size
    with file.open("rb") as f:
        head = f.read(8)
        if len(head) < 8:
            raise ValueError(_damaged(file, "cut in the header length", "at least 8", size))
        length = int.from_bytes(head, "little")
        if length > HEADER_LIMIT:
            raise ValueError(
                f"{file}: a header of {length} bytes, the limit is {HEADER_LIMIT}; "
                "not a safetensors file, or one with far too many tensors"
            )
        if 8 + length > size:
            raise ValueError(_damaged(file, "cut in the header", f"at least {8 + length}", size))
        raw = f.read(length)
    try:
        entries = json.loads(raw)
        metadata = entries.pop("__metadata__", {})
        tensors = {name: _stored(file, name, entry) for name, entry in entries.items()}
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: the header is not one of safetensors: {error}") from None

    end = 0
    for name, (start, stop) in sorted(
        ((name, entry["data_offsets"]) for name, entry in entries.items()), key=lambda e: e[1]
    ):
        if start != end or stop - start != tensors[name].size:
            raise ValueError(
                f"{file}: {name} is at bytes {start} to {stop}, expected {end} to "
                f"{end + tensors[name].size} by its dtype and shape; download it again"
            )
        end = stop
    if 8 + length + end != size:
        what = "cut short" if 8 + length + end > size else "longer than its header says"
        raise ValueError(_damaged(file, what, str(8 + length + end), size))
    return tensors, metadata


def _damaged(file: Path, what: str, expected: str, size: int) -> str:
    return f"{file}: {what}: expected {expected} bytes, the file has {size}; download it again"


def _stored(file: Path, name: str, entry: Mapping[str, Any]) -> Stored:
    dtype, shape, offsets = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {dtype!r}, known are {', '.join(DTYPES)}")
    if len(offsets) != 2 or not all(isinstance(n, int) and n >= 0 for n in (*shape, *offsets)):
        raise ValueError(f"{name} has shape {entry['shape']}, bytes {offsets}")
    return Stored(name, file, dtype, shape, torch.Size(shape).numel() * DTYPES[dtype].itemsize)


@dataclass(frozen=True)
class Pending:
    """A tensor to be written, made when its turn comes."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    make: Callable[[], Tensor]

    @property
    def size(self) -> int:
        """Bytes."""
        return self.shape.numel() * self.dtype.itemsize


def write_shard(file: Path, tensors: Iterable[Pending], metadata: Mapping[str, str]) -> None:
    """One safetensors file, one tensor in memory at a time. Wide dtypes come first, so every tensor is aligned."""
    ordered = sorted(tensors, key=lambda t: (-t.dtype.itemsize, t.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.size],
        }
        end += tensor.size
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with file.open("wb") as f:
        f.write(len(raw).to_bytes(8, "little") + raw)
        for tensor in ordered:
            data = tensor.make().detach().cpu().contiguous()
            assert (data.dtype, data.shape) == (tensor.dtype, tensor.shape), tensor.name
            f.write(data.reshape(-1).view(torch.uint8).numpy().data)
        f.flush()
        os.fsync(f.fileno())


def some(names: Sequence[str], most: int = 12) -> str:
    """The first few of a list, and how many more there are."""
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def few(lines: Sequence[str], most: int = 12) -> list[str]:
    """The first few of many lines, and one that says how many more there are."""
    return [*lines[:most], *([f"... {len(lines) - most} more"] if len(lines) > most else [])]
