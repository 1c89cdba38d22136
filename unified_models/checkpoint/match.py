"""Matching a checkpoint against a built model, from headers alone: strict both ways."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from unified_models.checkpoint.names import Names, Part, input_scale_name
from unified_models.checkpoint.quantized import (
    LAYOUTS,
    PLAIN,
    PLAIN_FORMATS,
    base,
    beside,
    expect,
    recognise,
)
from unified_models.checkpoint.shards import Shards, Stored, some
from unified_models.formats import Format, accepts, find
from unified_models.quantization import Quantization
from unified_models.weight import Table, Weight

FORMATS_KEY = "unified_models.formats"
"""Key of the header metadata in which a checkpoint of float32 masters keeps their formats, as JSON: name -> format."""
ELSEWHERE = "an expert that another process holds"
NO_INPUT_SCALE = "activations stay as they are (W4A16)"


@dataclass(frozen=True)
class Source:
    """Where one part lies in the file. format: as the file holds it, or says its packed values are; None: a table.

    scales: what is beside codes, by their names in `Packed`. input_scale: of a format whose input has a static one.
    master: the tensor is a master that a checkpoint of masters holds, not packed values.
    """

    part: Part
    tensor: Stored
    scales: Mapping[str, Stored] = field(default_factory=dict)
    format: Format | None = None
    input_scale: Stored | None = None
    master: bool = False

    @property
    def size(self) -> int:
        """Bytes in the file."""
        beside = (*self.scales.values(), *([self.input_scale] if self.input_scale else []))
        return self.tensor.size + sum(scale.size for scale in beside)


@dataclass
class Match:
    """sources: what each part is filled from. skipped: tensor name -> the rule's reason. defaulted: parts that the
    checkpoint lacks, and that have a value then. The rest are problems."""

    sources: list[Source] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    """tensor name -> the one that it must equal, since the model has one of them"""
    defaulted: list[Part] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    formats: dict[str, Format] = field(default_factory=dict)
    """module path of each Weight -> the format that the file gives it"""
    notes: list[str] = field(default_factory=list)
    """tensors that are held otherwise than a pattern of config.json implies, one a line"""

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
    quantization = quantization_of(names)
    for part in names.parts:
        if part.of_input:
            continue
        present = [name for name in part.spellings() if name in shards.tensors]
        if not present:
            absent_is_fine = isinstance(part.owner, Weight) and part.owner.default is not None
            found.defaulted.extend([part] if absent_is_fine else [])
            found.missing.extend([] if absent_is_fine else [part.name])
            continue
        tensor = shards.tensors[present[0]]
        scales = beside(tensor.name, shards.tensors)
        input_scale = shards.tensors.get(input_scale_name(tensor.name))
        used.update(present, (scale.name for scale in scales.values()))
        if len(present) > 1:
            found.wrong.append(f"{' and '.join(present)} are the same tensor of {part.path}")
            continue
        try:
            source = _source(part, tensor, scales, packed_formats, quantization)
            found.sources.append(_with_input(source, input_scale))
        except ValueError as problem:
            found.wrong.append(str(problem))
            used.update([input_scale.name] if input_scale else [])
            continue
        if input_scale is not None:
            used.add(input_scale.name)
            if found.sources[-1].input_scale is None:
                found.skipped[input_scale.name] = NO_INPUT_SCALE
    for part in (part for part in names.elsewhere if not part.of_input):
        for name in set(part.spellings()) & shards.tensors.keys():
            others = [scale.name for scale in beside(name, shards.tensors).values()]
            used.update([name, input_scale_name(name), *others])
            found.skipped[name] = ELSEWHERE
    for name in shards.tensors:
        if name not in used:
            _settle_unused(name, names, shards, found)
    _settle_formats(found, quantization)
    return found


def _settle_unused(name: str, names: Names, shards: Shards, found: Match) -> None:
    twin = names.twin(name)
    if twin is not None:
        others = [other for other in twin.spellings() if other in shards.tensors]
        found.same.update(dict.fromkeys([name], others[0]) if others else {})
        found.skipped[name] = f"the same tensor as {twin.name}"
        return
    reason = names.reason(name)
    if reason is None:
        found.unused.append(name)
    else:
        found.skipped[name] = reason


def quantization_of(names: Names) -> Quantization | None:
    """What config.json says of each module, if the architecture reads that."""
    said = getattr(getattr(names.model, "config", None), "quantization", None)
    return said if isinstance(said, Quantization) else None


def _source(
    part: Part,
    tensor: Stored,
    scales: Mapping[str, Stored],
    packed_formats: dict[str, str],
    quantization: Quantization | None,
) -> Source:
    """The source of one part, without the scale of its input."""
    owner = part.owner
    if isinstance(owner, Table):
        if tensor.dtype not in ("I64", "I32"):
            raise ValueError(f"{tensor.name} is {tensor.dtype}, expected I64 or I32 for a table")
        if tensor.shape != tuple(part.shape):
            raise ValueError(f"{tensor.name} is {tensor.shape}, expected {tuple(part.shape)}")
        for scale in scales.values():
            raise ValueError(f"{scale.name} scales nothing: {tensor.name} is a table")
        return Source(part, tensor)
    kind, pieces = recognise(tensor, scales, part.shape, owner.declared)
    master = tensor.dtype in PLAIN and tensor.name in packed_formats
    if master:
        kind = packed_formats[tensor.name]
    else:
        said = owner.declared
        if said is None and quantization is not None:
            said = quantization.expected(base(tensor.name))
        # a config that names a member of a family leaves no choice to the file
        kind = said if said in LAYOUTS and accepts(kind, said) else kind
    return Source(part, tensor, pieces, find(kind), master=master)


def _with_input(source: Source, input_scale: Stored | None) -> Source:
    """The source, with the scale of its input where its format needs one."""
    if source.format is None or source.format.input != "static":
        return source
    name = source.tensor.name
    if input_scale is None:
        raise ValueError(
            f"{name} holds {source.format.name}, whose input has a static scale, and "
            f"{input_scale_name(name)} is missing"
        )
    if input_scale.dtype != "F32":
        raise ValueError(f"{input_scale.name} is {input_scale.dtype}, expected F32")
    expect(input_scale, ())
    return Source(
        source.part, source.tensor, source.scales, source.format, input_scale, source.master
    )


def _settle_formats(found: Match, quantization: Quantization | None) -> None:
    """One format for each Weight: the experts of a stack agree, and so does what config and architecture say."""
    first: dict[str, Source] = {}
    contradicted: set[str] = set()
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
        for said in {owner.declared: 0, _stated(source, quantization): 0}:
            if path not in contradicted and not accepts(said, format.name):
                contradicted.add(path)
                found.wrong.append(
                    f"contradiction: config says {said} for {path}, "
                    f"tensor {source.tensor.name} holds {format.name} ({_dtypes(source)})"
                )
        found.formats[path] = format
        if owner.declared is None and quantization is not None:
            implied = quantization.expected(base(source.tensor.name))
            if not accepts(implied, format.name):
                found.notes.append(
                    f"{source.tensor.name}: a pattern of config.json implies {implied}, "
                    f"the file holds {format.name}"
                )
    for part in found.defaulted:
        if isinstance(part.owner, Weight):
            found.formats[part.path] = find(part.owner.declared or "float32")


def _stated(source: Source, quantization: Quantization | None) -> str | None:
    """What the config states for this very tensor; None where it gives a pattern, or does not mention a plain one."""
    if quantization is None:
        return None
    stated = quantization.stated(base(source.tensor.name))
    assert source.format is not None
    plain = stated == "bfloat16" and source.format.name in PLAIN_FORMATS
    return None if plain else stated


def _dtypes(source: Source) -> str:
    scales = " and ".join(scale.dtype for scale in source.scales.values())
    return source.tensor.dtype + (f" with {scales} scales" if scales else "")
