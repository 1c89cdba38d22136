"""What a verification found: a table of cells, and whether all of it holds."""

import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from unified_models.verify.compare import Comparison, Gap, bits, gap
from unified_models.verify.counters import Counters


@dataclass(frozen=True)
class Key:
    """One cell of the table."""

    numerics: str
    threads: int
    kind: str
    length: int


@dataclass
class Cell:
    """runs: of sequences. expected: tokens that have a logprob; for sequences of 0 and 1 tokens that may be none."""

    runs: int = 0
    expected: int = 0
    bits: Comparison = field(default_factory=lambda: Comparison(0, 0))
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def add(self, reference: Tensor, found: Tensor) -> Comparison:
        """One more sequence: float32 logprobs of the reference and of a schedule."""
        one = bits(reference, found)
        self.runs += 1
        self.expected += len(found)
        self.bits += one
        self.pairs.append((reference, found))
        return one

    def fault(self, length: int) -> str | None:
        """Why the cell fails, if it does."""
        if self.runs == 0:
            return "no sequence was run"
        if self.bits.compared != self.expected or (length > 1 and self.bits.compared == 0):
            return f"{self.bits.compared} of {self.expected} tokens were compared"
        return str(self.bits) if self.bits.unequal else None

    @property
    def gap(self) -> Gap:
        return gap([a for a, _ in self.pairs], [b for _, b in self.pairs])


@dataclass
class Report:
    """Of one verification.

    wanted: the least number of tokens to compare. absent: counters of what the model has not; demanded: whether each of
    the others must have counted something. controls: one line for each numerics. differences: the first operator and
    token at which an unequal run parts from the reference. faults: everything else that must not be."""

    folder: str
    seed: int
    wanted: int
    cells: dict[Key, Cell] = field(default_factory=lambda: defaultdict(Cell))
    counters: Counters = field(default_factory=Counters)
    absent: set[str] = field(default_factory=set)
    demanded: bool = False
    controls: dict[str, str] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    seconds: float = 0.0
    fingerprints: dict[str, dict[str, Any]] = field(default_factory=dict)
    """by numerics: what the bits may depend on"""
    columns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """by kind: seconds of running it"""

    @property
    def total(self) -> Comparison:
        return sum((cell.bits for cell in self.cells.values()), Comparison(0, 0))

    @property
    def counts(self) -> dict[str, int]:
        """What was met, by name, of all that the model has."""
        return self.counters.without(self.absent)

    def problems(self) -> Iterator[str]:
        """Everything that fails."""
        for key, cell in self.cells.items():
            fault = cell.fault(key.length)
            if fault:
                where = f"{key.numerics}, {key.threads} thread(s), {key.kind}, length {key.length}"
                yield f"{where}: {fault}"
        if self.total.compared < max(self.wanted, 1):
            yield f"{self.total.compared} tokens compared, {max(self.wanted, 1)} wanted"
        if self.demanded:
            yield from (f"never met: {name}" for name, count in self.counts.items() if not count)
        yield from self.faults

    @property
    def ok(self) -> bool:
        return not any(self.problems())

    def table(self) -> RenderableType:
        """For a terminal: a table for each numerics and number of threads, then counters, controls and the verdict."""
        groups = dict.fromkeys((key.numerics, key.threads) for key in self.cells)
        parts: list[RenderableType] = [self._grid(*group) for group in groups]
        met = ", ".join(f"{name} {value}" for name, value in self.counts.items())
        parts.append(Text(f"met: {met}"))
        parts += [Text(f"control, {numerics}: {line}") for numerics, line in self.controls.items()]
        parts += [Text(f"first difference: {line}", style="bold red") for line in self.differences]
        problems = list(self.problems())
        parts += [Text(line, style="red") for line in problems[:20]]
        if len(problems) > 20:
            parts.append(Text(f"... {len(problems) - 20} more", style="red"))
        verdict = "all bits are equal" if not problems else "NOT verified"
        head = f"{self.total.compared} tokens compared, {self.total.unequal} unequal, {self.seconds:.0f} s"
        parts.append(
            Text(f"{self.folder}: {head}: {verdict}", style="green" if not problems else "bold red")
        )
        return Group(*parts)

    def _grid(self, numerics: str, threads: int) -> Table:
        mine = {
            k: c for k, c in self.cells.items() if (k.numerics, k.threads) == (numerics, threads)
        }
        kinds = list(dict.fromkeys(key.kind for key in mine))
        title = f"{numerics}, {threads} thread{'s' * (threads > 1)}: tokens compared, or sequences without any"
        table = Table("length", *kinds, title=title, title_justify="left")
        for column in table.columns:
            column.justify = "right"
        for length in sorted({key.length for key in mine}):
            keys = [Key(numerics, threads, kind, length) for kind in kinds]
            shown = [_shown(mine[key], length) if key in mine else Text() for key in keys]
            table.add_row(str(length), *shown)
        table.add_section()
        sums = [_sum([c for k, c in mine.items() if k.kind == kind]) for kind in kinds]
        table.add_row("tokens", *(str(cell.bits.compared) for cell in sums))
        table.add_row("unequal", *(str(cell.bits.unequal) for cell in sums))
        gaps = [cell.gap for cell in sums]
        for name in ("valid", "max", "mean", "std", "k3"):
            table.add_row(
                name,
                *(f"{getattr(g, name):.2g}" if name != "valid" else str(g.valid) for g in gaps),
            )
        return table

    def to_json(self) -> str:
        """All cells, with the five numbers of each."""
        return json.dumps(self.as_dict(), indent=1)

    def as_dict(self) -> dict[str, Any]:
        """What `to_json` writes."""
        total = self.total
        return {
            "ok": self.ok,
            "folder": self.folder,
            "seed": self.seed,
            "seconds": round(self.seconds, 2),
            "fingerprints": self.fingerprints,
            "columns": {kind: round(seconds, 2) for kind, seconds in self.columns.items()},
            "compared": total.compared,
            "unequal": total.unequal,
            "wanted": self.wanted,
            "counters": self.counts,
            "controls": self.controls,
            "differences": self.differences,
            "problems": list(self.problems()),
            "cells": [
                asdict(key)
                | {
                    "sequences": cell.runs,
                    "compared": cell.bits.compared,
                    "unequal": cell.bits.unequal,
                }
                | asdict(cell.gap)
                for key, cell in self.cells.items()
            ],
        }


def _sum(cells: list[Cell]) -> Cell:
    total = Cell()
    for cell in cells:
        total.runs += cell.runs
        total.expected += cell.expected
        total.bits += cell.bits
        total.pairs += cell.pairs
    return total


def _shown(cell: Cell, length: int) -> Text:
    """Tokens compared; where there is nothing to compare, how many sequences were run."""
    if cell.fault(length):
        return Text(f"{cell.bits.compared}: {cell.bits.unequal} unequal", style="bold red")
    return Text(str(cell.bits.compared) if cell.expected else f"0 ({cell.runs} run)")
