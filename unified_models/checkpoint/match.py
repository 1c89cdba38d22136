"""Matching a checkpoint against a built model, from headers alone: strict both ways."""

from dataclasses import dataclass, field

from unified_models.checkpoint.names import Names, Part
from unified_models.checkpoint.quantized import PLAIN, recognise, scale_names
from unified_models.checkpoint.shards import Shards, Stored, some
from unified_models.formats import Format, accepts, find
from unified_models.weight import Table, Weight

FORMATS_KEY = "unified_models.formats"
"""Key of the header metadata in which a checkpoint of float32 masters keeps their formats, as JSON: name -> format."""


@dataclass(frozen=True)
class Source:
    """Where one part lies in the file. format: as the file holds it, or says its packed values are; None: a table.

    master: the tensor is a master that a checkpoint of masters holds, not packed values.
    """

    part: Part
    tensor: Stored
    scale: Stored | None = None
    format: Format | None = None
    master: bool = False

    @property
    def size(self) -> int:
        """Bytes in the file."""
        return self.tensor.size + (self.scale.size if self.scale else 0)


@dataclass
class Match:
    """sources: what each part is filled from. skipped: tensor name -> the rule's reason. The rest are problems."""

    sources: list[Source] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    formats: dict[str, Format] = field(default_factory=dict)
    """module path of each Weight -> the format that the file gives it"""

    def problems(self) -> list[str]:
        """Why this checkpoint cannot be loaded, one a line; empty if it can."""
        return [
            *([f"missing ({len(self.missing)}): {some(self.missing)}"] if self.missing else []),
            *([f"unused ({len(self.unused)}): {some(self.unused)}"] if self.unused else []),
            *self.wrong[:20],
            *([f"... {len(self.wrong) - 20} more of this kind"] if len(self.wrong) > 20 else []),
        ]


def match(names: Names, shards: Shards, packed_formats: dict[str, str]) -> Match:
    """Find every part of a model in a checkpoint, and a reason for every tensor.

    packed_formats: tensor name -> format, of tensors that hold float32 masters (`FORMATS_KEY`).
    """
    found = Match()
    used: set[str] = set()
    for part in names.parts:
        present = [name for name in part.spellings() if name in shards.tensors]
        if not present:
            found.missing.append(part.name)
            continue
        tensor = shards.tensors[present[0]]
        scales = [name for name in scale_names(tensor.name) if name in shards.tensors]
        used.update(present, scales)
        if len(present) > 1 or len(scales) > 1:
            twice = present if len(present) > 1 else scales
            found.wrong.append(f"{' and '.join(twice)} are the same tensor of {part.path}")
            continue
        scale = shards.tensors[scales[0]] if scales else None
        try:
            found.sources.append(_source(part, tensor, scale, packed_formats))
        except ValueError as problem:
            found.wrong.append(str(problem))
    for name in shards.tensors:
        if name not in used:
            reason = names.reason(name)
            if reason is None:
                found.unused.append(name)
            else:
                found.skipped[name] = reason
    _settle_formats(found)
    return found


def _source(
    part: Part, tensor: Stored, scale: Stored | None, packed_formats: dict[str, str]
) -> Source:
    if isinstance(part.owner, Table):
        if tensor.dtype not in ("I64", "I32"):
            raise ValueError(f"{tensor.name} is {tensor.dtype}, expected I64 or I32 for a table")
        if tensor.shape != tuple(part.shape):
            raise ValueError(f"{tensor.name} is {tensor.shape}, expected {tuple(part.shape)}")
        if scale is not None:
            raise ValueError(f"{scale.name} scales nothing: {tensor.name} is a table")
        return Source(part, tensor)
    kind = recognise(tensor, scale, part.shape, part.owner.declared)
    master = tensor.dtype in PLAIN and tensor.name in packed_formats
    return Source(
        part, tensor, scale, find(packed_formats[tensor.name] if master else kind), master
    )


def _settle_formats(found: Match) -> None:
    """One format for each Weight: the experts of a stack agree, and so does what the architecture declares."""
    first: dict[str, Source] = {}
    for source in found.sources:
        path, owner, format = source.part.path, source.part.owner, source.format
        if not isinstance(owner, Weight) or format is None:
            continue
        before = first.setdefault(path, source)
        if before.format is not format:
            assert before.format is not None
            found.wrong.append(
                f"{path}: {before.tensor.name} holds {before.format.name}, "
                f"{source.tensor.name} holds {format.name}"
            )
        elif before is source and not accepts(owner.declared, format.name):
            found.wrong.append(
                f"contradiction: config says {owner.declared} for {path}, "
                f"tensor {source.tensor.name} holds {format.name} ({_dtypes(source)})"
            )
        found.formats[path] = format


def _dtypes(source: Source) -> str:
    return source.tensor.dtype + (f" with {source.scale.dtype} scales" if source.scale else "")
