"""Two-way name tables: the module path of each Weight and Table, and its tensor names in a checkpoint.

A model file ends with `NAMES`, a pattern of module paths -> a tensor name, or several (the first is written, the
others are read too). In a pattern:

    {l}          a number, the same on both sides
    {w:a|b}      one of these words, the same on both sides
    {w:a=x|b=y}  a in the path is x in the name, b is y
    {e}          on the right only: one tensor for each matrix of a stacked Weight, numbered from 0

and with `SKIPPED`, a regular expression of tensor names -> why such tensors are not part of the model; and `SAME`, a
name that some files have -> the tensor that it must equal there (a tied head). On reading, a name may carry a leading
"model.", as some exporters write it.

No pattern names an input scale: it is called after the weight that it belongs to, X.input_scale beside X.weight.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from unified_models.model import LanguageModel
from unified_models.weight import Table, Weight

NameTable = Mapping[str, str | tuple[str, ...]]

_HOLE = re.compile(r"\{(\w+)(?::([^}]*))?\}")
_PREFIX = "model."


@dataclass(frozen=True)
class Part:
    """One tensor of a checkpoint: a whole Weight or Table, or matrix `index` of a stacked Weight.

    names: as a checkpoint may spell it, without the "model." prefix; the first is the one that is written.
    of_input: it is the input scale of the part before, which it comes with.
    """

    path: str
    owner: Weight | Table
    names: tuple[str, ...]
    index: int | None = None
    of_input: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> torch.Size:
        return self.owner.shape if self.index is None else self.owner.shape[1:]

    def spellings(self) -> Iterator[str]:
        """Every name under which a checkpoint may hold it."""
        for name in self.names:
            yield name
            yield _PREFIX + name


class Pattern:
    """One row of a name table."""

    def __init__(self, path: str, names: str | tuple[str, ...]) -> None:
        self.path = path
        self.names = (names,) if isinstance(names, str) else names
        self.renames: dict[str, dict[str, str]] = {}
        self.holes: set[str] = set()
        pieces, end = [], 0
        for hole in _HOLE.finditer(path):
            pieces.append(re.escape(path[end : hole.start()]) + self._group(hole[1], hole[2]))
            end = hole.end()
        self.regex = re.compile("".join(pieces) + re.escape(path[end:]))
        self.counter = self._counter()

    def _group(self, name: str, choices: str | None) -> str:
        assert name not in self.holes, f"{self.path}: {{{name}}} twice"
        self.holes.add(name)
        if choices is None:
            return rf"(?P<{name}>\d+)"
        pairs = (choice.partition("=") for choice in choices.split("|"))
        self.renames[name] = {left: right if equals else left for left, equals, right in pairs}
        return f"(?P<{name}>{'|'.join(map(re.escape, self.renames[name]))})"

    def _counter(self) -> str | None:
        """The hole that runs over the matrices of a stacked Weight, if there is one."""
        free = {hole[1] for name in self.names for hole in _HOLE.finditer(name)} - self.holes
        assert len(free) <= 1, f"{self.path}: {sorted(free)} are on the right only"
        for counter in free:
            for name in self.names:
                assert f"{{{counter}}}" in name, f"{self.path}: no {{{counter}}} in {name!r}"
        return next(iter(free), None)

    def fill(self, match: re.Match[str], index: int | None) -> tuple[str, ...]:
        """The tensor names of a matched module path."""
        words = {
            name: self.renames.get(name, {}).get(word, word)
            for name, word in match.groupdict().items()
        }
        if self.counter is not None:
            words[self.counter] = str(index)
        return tuple(_HOLE.sub(lambda hole: words[hole[1]], name) for name in self.names)


@dataclass(frozen=True)
class Names:
    """The name table of one built model."""

    model: LanguageModel
    table: NameTable
    skipped: Mapping[str, str]
    same: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: LanguageModel) -> "Names":
        """The table at the end of the file that defines the model."""
        module = sys.modules[model.file()]
        skipped, same = (getattr(module, table, {}) for table in ("SKIPPED", "SAME"))
        return cls(model, module.NAMES, skipped, same)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Every tensor that a checkpoint of the model has, in module order."""
        patterns = [Pattern(path, names) for path, names in self.table.items()]
        found: list[Part] = []
        input_scales: set[Weight] = set()
        for path, owner in self.model.named_modules():
            if not isinstance(owner, Weight | Table) or owner in input_scales:
                continue
            parts = _parts_of(path, owner, patterns)
            found.extend(parts)
            if isinstance(owner, Weight) and owner.input_scale is not None:
                input_scales.add(owner.input_scale)
                found.extend(_input_scales(path, owner.input_scale, parts))
        seen: dict[str, str] = {}
        for part in found:
            for name in part.names:
                other = seen.setdefault(name, part.path)
                same = other == part.path
                assert same and part.names.count(name) == 1, f"{name} is {other} and {part.path}"
        return tuple(found)

    @cached_property
    def by_name(self) -> dict[str, Part]:
        """Part of every spelling that is read."""
        return {name: part for part in self.parts for name in part.spellings()}

    @cached_property
    def elsewhere(self) -> tuple[Part, ...]:
        """Tensors of the model that other processes hold: experts, with their input scales."""
        patterns = [Pattern(path, names) for path, names in self.table.items()]
        input_scales = {owner.input_scale for _, owner in self.model.weights()}
        found: list[Part] = []
        for path, owner in self.model.weights():
            if owner in input_scales or not owner.part_of_stack:
                continue
            parts = [
                part
                for part in _parts_of(path, owner, patterns, everywhere=True)
                if part.index is not None and not 0 <= part.index < owner.shape[0]
            ]
            found.extend(parts)
            if owner.input_scale is not None:
                found.extend(_input_scales(path, owner.input_scale, parts))
        return tuple(found)

    def reason(self, name: str) -> str | None:
        """Why a tensor of this name is skipped by rule; None if it is not."""
        for pattern, reason in self.skipped.items():
            if re.fullmatch(pattern, name.removeprefix(_PREFIX)):
                return reason
        return None

    def twin(self, name: str) -> Part | None:
        """The part that a tensor of this name, which is no part of its own, must equal."""
        other = self.same.get(name)
        return None if other is None or name in self.by_name else self.by_name[other]


def input_scale_name(name: str) -> str:
    """X.input_scale, of X.weight."""
    return f"{name.removesuffix('.weight')}.input_scale"


def _input_scales(path: str, owner: Weight, parts: list[Part]) -> Iterator[Part]:
    """One for each matrix of the weight at `path`."""
    for part in parts:
        names = tuple(map(input_scale_name, part.names))
        yield Part(f"{path}.input_scale", owner, names, part.index, of_input=True)


def _parts_of(
    path: str, owner: Weight | Table, patterns: list[Pattern], everywhere: bool = False
) -> list[Part]:
    """everywhere: also the matrices of a stack that other processes hold; their index is outside of this one's."""
    matches = [(p, m) for p in patterns if (m := p.regex.fullmatch(path))]
    assert matches, f"{path}: no pattern of NAMES names it"
    assert len(matches) == 1, f"{path}: {[p.path for p, _ in matches]} all name it"
    pattern, match = matches[0]
    if pattern.counter is None:
        return [Part(path, owner, pattern.fill(match, None))]
    assert isinstance(owner, Weight) and len(owner.shape) > 1, f"{path}: nothing is stacked in it"
    return [
        Part(path, owner, pattern.fill(match, e), e - owner.first)
        for e in (range(owner.stack) if everywhere else _held(owner))
    ]


def _held(owner: Weight) -> range:
    return range(owner.first, owner.first + owner.shape[0])
