"""What a checkpoint folder holds: one decision for each tensor, before anything is loaded."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from unified_models.checkpoint.changes import Change, told
from unified_models.checkpoint.divisor import settle_divisor
from unified_models.checkpoint.fill import repacked
from unified_models.checkpoint.loading import absent, build, match_folder, name_of
from unified_models.checkpoint.match import Match, Source
from unified_models.checkpoint.names import Names
from unified_models.checkpoint.shards import Shards, Stored, few, open_shards
from unified_models.progress import bar


@dataclass(frozen=True)
class Line:
    """One tensor of a file. path: of the Weight or Table that it fills, with [index] in a stack; None: no part's.

    format: of the weight it belongs to, or the whole-number dtype of a table; None where nothing reads it.
    decision: "read", "scale of <name>", "input scale of <name>", "skipped: <reason>", "unused", or "refused" (see the
    problems).
    """

    name: str
    file: str
    dtype: str
    shape: tuple[int, ...]
    size: int
    path: str | None
    format: str | None
    decision: str


@dataclass(frozen=True)
class Report:
    """lines: every tensor that the checkpoint lists. changed: tensors that packing gives other values; empty when
    values were not looked at. notes: what the file leaves to a default, and what it holds otherwise than patterns of
    config.json imply. problems: why `load` would refuse, one a line; empty: it loads."""

    folder: Path
    architecture: str
    lines: tuple[Line, ...]
    stray: tuple[str, ...]
    unlisted: tuple[str, ...]
    changed: tuple[Change, ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()
    formats: dict[str, int] = field(default_factory=dict)
    """format -> bytes in the file, scales included"""

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(line.size for line in self.lines)


def describe(
    folder: str | Path, *, values: bool = True, progress: bool = True, ignore_index: bool = False
) -> Report:
    """Decide about every tensor of a checkpoint folder.

    values: also read the tensors that packing might change, one at a time, and say which it does.
    Raises ValueError where there is nothing to describe: no config.json, an unknown model_type, broken files.
    """
    folder = Path(folder)
    model = build(folder)
    shards = open_shards(folder, ignore_index)
    found = match_folder(Names.of(model), shards)
    settle_divisor(found, shards)
    lines = _lines(found, shards)
    formats: Counter[str] = Counter()
    for line in lines:
        if line.format is not None:
            formats[line.format] += line.size
    problems = found.problems()
    changed = _look_at_values(found, shards, problems, progress) if values else []
    shards.close()
    return Report(
        folder=folder,
        architecture=name_of(model),
        lines=lines,
        stray=shards.stray,
        unlisted=shards.unlisted,
        changed=tuple(changed),
        problems=tuple(problems),
        notes=(*absent(found.defaulted), *found.notes),
        formats=dict(formats),
    )


def _look_at_values(
    found: Match, shards: Shards, problems: list[str], progress: bool
) -> list[Change]:
    changed: list[Change] = []
    size = sum(source.size for source in found.sources)
    with bar("reading", size, of_bytes=True, wanted=progress) as shown:
        for source in found.sources:
            try:
                change = repacked(shards, source)
                changed.extend([change] if change else [])
            except ValueError as problem:
                problems.append(str(problem))
            shown.advance(source.size)
    return changed


def _lines(found: Match, shards: Shards) -> tuple[Line, ...]:
    """In module order; what nothing reads comes last."""
    readers: dict[str, tuple[Source, str]] = {}
    for source in found.sources:
        readers[source.tensor.name] = (source, "read")
        for scale in source.scales.values():
            readers[scale.name] = (source, f"scale of {source.tensor.name}")
        if source.input_scale is not None:
            readers[source.input_scale.name] = (source, f"input scale of {source.tensor.name}")
    names = dict.fromkeys((*readers, *shards.tensors))
    return tuple(_line(shards.tensors[name], found, readers) for name in names)


def _line(stored: Stored, found: Match, readers: dict[str, tuple[Source, str]]) -> Line:
    path = format = None
    if stored.name in readers:
        source, decision = readers[stored.name]
        part = source.part
        path = part.path if part.index is None else f"{part.path}[{part.index}]"
        format = source.format.name if source.format else stored.dtype
    elif stored.name in found.skipped:
        decision = f"skipped: {found.skipped[stored.name]}"
    else:
        decision = "unused" if stored.name in found.unused else "refused"
    return Line(
        stored.name,
        stored.file.name,
        stored.dtype,
        stored.shape,
        stored.size,
        path,
        format,
        decision,
    )


def print_report(
    report: Report, console: Console | None = None, every_tensor: bool = False
) -> None:
    """Print a report: a row for each kind of tensor, or for every tensor; then what is odd about the folder."""
    console = console or Console()
    grid = Grid(box=None, header_style="bold", pad_edge=False)
    for heading in ("tensor", "format", "dtype", "shape", "bytes", "read by"):
        right = heading in ("shape", "bytes")
        grid.add_column(heading, justify="right" if right else "left", overflow="fold")
    for row in _rows(report.lines, every_tensor):
        grid.add_row(*map(Text, row))
    console.print(grid)

    changed = told(report.changed, len(report.changed) if every_tensor else 12)
    totals = ", ".join(f"{name} {size:,}" for name, size in sorted(report.formats.items()))
    count = len(report.lines)
    console.print(
        f"{report.architecture}: {count} tensors, {report.size:,} bytes ({totals})", highlight=False
    )
    for style, label, notes in (
        ("yellow", "file not read", report.stray),
        ("yellow", "not in the index", report.unlisted),
        ("yellow", "note", report.notes if every_tensor else few(report.notes)),
        ("yellow", "re-packed with other values", changed),
        ("red", "problem", report.problems),
    ):
        for note in notes:
            console.print(Text(f"{label}: {note}", style=style))


_NUMBER = re.compile(r"(?<=[.\[])\d+(?=[.\]]|$)")


def _rows(lines: Iterable[Line], every_tensor: bool) -> Iterator[tuple[str, ...]]:
    """Cells of each line; or of each group of lines that differ in the numbers within their names only."""
    groups: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        reader = line.path if line.decision == "read" else line.decision.partition(" of ")[0]
        name, reader = line.name, reader or "-"
        if not every_tensor:
            name, reader = _NUMBER.sub("*", name), _NUMBER.sub("*", reader)
        shape = "[" + ", ".join(map(str, line.shape)) + "]"
        groups.setdefault((name, line.format or "-", line.dtype, shape, reader), []).append(line)
    for (name, format, dtype, shape, reader), group in groups.items():
        times = f"{len(group)} x " if len(group) > 1 else ""
        yield name, format, dtype, times + shape, f"{sum(line.size for line in group):,}", reader
