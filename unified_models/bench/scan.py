"""Mamba-2's scan by itself: what a decoded row costs, against a token of a chunk that is run whole."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from math import log
from statistics import linear_regression, median
from typing import Any

import torch
from rich.console import Group
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from unified_models.bench.clock import in_turn, seconds_of
from unified_models.bench.conditions import machine
from unified_models.context.lists import scan_grid
from unified_models.context.slots import State
from unified_models.context.step import Step
from unified_models.ops.scan import scan
from unified_models.verify.compare import Comparison, bits

CHUNKS = (16, 32, 64, 128, 256)
SPAN = 256  # tokens of each sequence: whole chunks of every length
MANY = 16  # sequences side by side
CALLS = {1: 16, MANY: 2, SPAN: 2}  # on the clock in a round, by the tokens of a call


@dataclass(frozen=True)
class Widths:
    """A scan's sizes."""

    name: str
    heads: int
    head_dim: int
    state_size: int
    groups: int

    def __str__(self) -> str:
        return f"H {self.heads}, P {self.head_dim}, N {self.state_size}, G {self.groups}"


WIDTHS = (Widths("tiny", 8, 16, 32, 2), Widths("Nemotron 30B", 64, 64, 128, 8))


@dataclass(frozen=True)
class Rows:
    """Random inputs of `MANY` sequences of `SPAN` tokens: x, dt and b as the memory gives them, c as the model does."""

    x_STHP: Tensor
    dt_STH: Tensor
    b_STGN: Tensor
    c_STGN: Tensor
    a_H: Tensor
    skip_H: Tensor

    @classmethod
    def random(cls, widths: Widths, seed: int) -> "Rows":
        """Time steps from 0.02 to 0.5; rows rounded to bfloat16, as they are kept."""
        H, P, N, G = widths.heads, widths.head_dim, widths.state_size, widths.groups
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).bfloat16()

        dt_STH = 0.02 + 0.48 * torch.rand(MANY, SPAN, H, generator=generator)
        x_STHP, b_STGN = normal(MANY, SPAN, H, P).float(), normal(MANY, SPAN, G, N).float()
        c_STGN, a_H = normal(MANY, SPAN, G, N), -torch.exp(normal(H).float())
        return cls(x_STHP, dt_STH, b_STGN, c_STGN, a_H, normal(H).float())


@dataclass(frozen=True)
class Scans:
    """Both ways through the operator for one chunk length, on the same sequences."""

    rows: Rows
    slot: State

    @classmethod
    def of(cls, rows: Rows, widths: Widths, chunk: int) -> "Scans":
        """With states of these widths."""
        shape = (widths.heads, widths.head_dim, widths.state_size)
        return cls(rows, State(shape, groups=widths.groups, chunk=chunk))

    def whole(self, s: int) -> tuple[Tensor, Tensor]:
        """All chunks of sequence s from its start: y of its tokens, and the state after each chunk."""
        step, r = Step.of([SPAN]), self.rows
        grid = scan_grid(step, self.slot, step.starts_S[:-1])
        states = torch.zeros(1, *self.slot.shape)
        parts = (r.x_STHP[s], r.dt_STH[s], r.b_STGN[s], r.c_STGN[s])
        y_THP, states_UHPN = scan(*parts, r.a_H, r.skip_H, states, grid)
        return y_THP, states_UHPN

    def decode(self, states_SHPN: Tensor) -> Tensor:
        """The last token but one of the first sequences, as a sampler meets it: in a chunk that one more would fill."""
        count, Q, r = len(states_SHPN), self.slot.chunk, self.rows
        boundary, past = SPAN - Q, SPAN - 2
        open_ = slice(boundary, past + 1)
        step = Step.of([1] * count, [past] * count)
        base_S = torch.arange(count) * (past + 1 - boundary) - boundary
        grid = scan_grid(step, self.slot, base_S)
        x_RHP, dt_RH, b_RGN = (
            rows[:count, open_].flatten(0, 1) for rows in (r.x_STHP, r.dt_STH, r.b_STGN)
        )
        c_TGN = r.c_STGN[:count, past]
        return scan(x_RHP, dt_RH, b_RGN, c_TGN, r.a_H, r.skip_H, states_SHPN, grid)[0]

    def boundaries(self) -> tuple[Tensor, Tensor]:
        """By whole(): what decode must give, and the states that it starts from."""
        ys, states = [], []
        for s in range(MANY):
            y_THP, states_UHPN = self.whole(s)
            ys.append(y_THP[SPAN - 2])
            states.append(states_UHPN[-2] if len(states_UHPN) > 1 else torch.zeros(self.slot.shape))
        return torch.stack(ys), torch.stack(states)


@dataclass(frozen=True)
class Cost:
    """Of one chunk length: seconds a token in each round, and multiply-adds of a row's matrix products."""

    chunk: int
    one: list[float]
    many: list[float]
    whole: list[float]
    products: int

    def as_dict(self) -> dict[str, Any]:
        """Medians and rounds."""
        names = {"row, 1 sequence": self.one, f"row, {MANY} sequences": self.many}
        names["whole chunks"] = self.whole
        told = {name: {"seconds": median(each), "every": each} for name, each in names.items()}
        return {"chunk": self.chunk, "multiply_adds": self.products} | told


@dataclass(frozen=True)
class ScanResult:
    """Costs at some widths. gate: rows against whole chunks; where it is not clean, nothing was timed."""

    widths: Widths
    conditions: dict[str, Any]
    gate: Comparison
    costs: list[Cost] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was compared, and all bits were equal."""
        return self.gate.compared > 0 and not self.gate.unequal

    @property
    def refusal(self) -> str:
        """Why there are no times."""
        return f"scan, {self.widths.name}: no times, since its bits are not right: {self.gate}"

    def growth(self) -> dict[str, float]:
        """The power of Q with which each cost grows, fitted over all chunk lengths: 1 is linear, 2 quadratic."""
        logs = [log(cost.chunk) for cost in self.costs]
        each = {
            "a row, 1 sequence": [median(cost.one) for cost in self.costs],
            f"a row, {MANY} sequences": [median(cost.many) for cost in self.costs],
            "the whole chunk": [median(cost.whole) * cost.chunk for cost in self.costs],
        }
        return {
            name: linear_regression(logs, [log(value) for value in values]).slope
            for name, values in each.items()
        }

    def as_dict(self) -> dict[str, Any]:
        """Everything, rounds included."""
        gate = {"compared": self.gate.compared, "unequal": self.gate.unequal}
        found: dict[str, Any] = {"scan": self.widths.name, "widths": vars(self.widths)}
        found |= {"conditions": self.conditions, "gate": gate}
        if self.ok:
            found |= {"costs": [cost.as_dict() for cost in self.costs], "growth": self.growth()}
        return found

    def table(self) -> Group:
        """Costs by chunk length, how they grow, and what was compared."""
        table = Table(title=f"scan, {self.widths.name} ({self.widths}): microseconds")
        headers = ("Q", "a row, 1 sequence", f"a row, {MANY} sequences", "a token of whole chunks")
        for header in (*headers, "the whole chunk", "multiply-adds of a row"):
            table.add_column(header, justify="right")
        for cost in self.costs:
            one, many, whole = (median(each) * 1e6 for each in (cost.one, cost.many, cost.whole))
            cells = (f"{one:.0f}", f"{many:.0f}", f"{whole:.1f}", f"{whole * cost.chunk:.0f}")
            table.add_row(str(cost.chunk), *cells, f"{cost.products:,}")
        first, last = self.costs[0], self.costs[-1]
        times = median(last.one) / median(first.one), median(last.many) / median(first.many)
        work = last.products / first.products
        powers = ", ".join(f"{name} as Q^{power:.2f}" for name, power in self.growth().items())
        return Group(
            table,
            Text(
                f"Q {last.chunk} against {first.chunk}: a row takes {times[0]:.1f} times as long (1 sequence), "
                f"{times[1]:.1f} ({MANY}), with {work:.1f} times the multiply-adds; linear growth would be "
                f"{last.chunk / first.chunk:.0f}, quadratic {(last.chunk / first.chunk) ** 2:.0f}"
            ),
            Text(f"fitted over all: {powers}"),
            Text(
                f"before: {self.gate.compared} values of rows compared with whole chunks, 0 unequal bits"
            ),
            Text(", ".join(f"{key} {value}" for key, value in self.conditions.items())),
        )


def multiply_adds(scans: Scans, states_SHPN: Tensor) -> int:
    """Of the matrix products of one decoded row."""
    counter = FlopCounterMode(display=False)
    with counter:
        scans.decode(states_SHPN[:1])
    return int(counter.get_total_flops()) // 2


@torch.no_grad()
def run_scan(
    widths: Widths,
    repeats: int,
    seed: int = 0,
    command: str = "",
    chunks: tuple[int, ...] = CHUNKS,
) -> ScanResult:
    """Check that decoded rows have the bits of whole chunks, then time both, all chunk lengths in turn.

    command: what was typed, for the record. chunks: divisors of SPAN, ascending.
    """
    rows, told = Rows.random(widths, seed), {"command": command} | machine()
    gate, works = Comparison(0, 0), dict[str, Callable[[], float]]()
    scans = {chunk: Scans.of(rows, widths, chunk) for chunk in chunks}
    for each in scans.values():
        wanted_SHP, states_SHPN = each.boundaries()
        for count in (1, MANY):
            gate += bits(each.decode(states_SHPN[:count]), wanted_SHP[:count])
        works |= _works(each, states_SHPN)
    if gate.unequal:
        return ScanResult(widths, told, gate)
    rounds = iter(in_turn(works, repeats).values())
    zeros = torch.zeros(1, *scans[chunks[0]].slot.shape)
    costs = [
        Cost(chunk, next(rounds), next(rounds), next(rounds), multiply_adds(each, zeros))
        for chunk, each in scans.items()
    ]
    return ScanResult(widths, told, gate, costs)


def _works(scans: Scans, states_SHPN: Tensor) -> dict[str, Callable[[], float]]:
    """A row alone, MANY rows, and whole chunks: each gives its seconds a token."""

    def per_token(tokens: int, work: Callable[[], object]) -> float:
        calls = CALLS[tokens]
        return seconds_of(lambda: [work() for _ in range(calls)]) / (calls * tokens)

    each: dict[int, Callable[[], object]] = {
        1: lambda: scans.decode(states_SHPN[:1]),
        MANY: lambda: scans.decode(states_SHPN),
        SPAN: lambda: scans.whole(0),
    }
    chunk = scans.slot.chunk
    return {f"{chunk}, {n}": partial(per_token, n, work) for n, work in each.items()}


def scan_results(repeats: int, seed: int = 0, command: str = "") -> Iterator[ScanResult]:
    """At each of WIDTHS."""
    return (run_scan(widths, repeats, seed, command) for widths in WIDTHS)
