"""What a bench run found: a table to read, JSON to keep."""

from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from unified_models.bench.jobs import Ran
from unified_models.verify.compare import Comparison


@dataclass(frozen=True)
class Speed:
    """What a case took in each round."""

    name: str
    tokens: int
    seconds: list[float]

    @property
    def rates(self) -> list[float]:
        """Tokens a second in each round."""
        return [self.tokens / s for s in self.seconds]

    def as_dict(self) -> dict[str, Any]:
        """The median, the extremes, and every round."""
        rates = self.rates
        return {
            "tokens": self.tokens,
            "tokens_per_second": median(rates),
            "lowest": min(rates),
            "highest": max(rates),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class JobTimes:
    """What a job took in each round, and what the engine counted (alike in all rounds)."""

    name: str
    tokens: int
    rans: list[Ran]

    @property
    def overhead(self) -> float:
        """Median over the rounds."""
        return median(ran.overhead for ran in self.rans)

    def as_dict(self) -> dict[str, Any]:
        """Times of all rounds, counts of the last."""
        stats = self.rans[-1].stats
        return {
            "tokens": self.tokens,
            "seconds": median(ran.seconds for ran in self.rans),
            "every_seconds": [ran.seconds for ran in self.rans],
            "steps": stats.steps,
            "tokens_run": stats.tokens,
            "tokens_recomputed": stats.tokens_recomputed,
            "prefix_hits": stats.prefix_hits,
            "preemptions": stats.preemptions,
            "waited_for_state": stats.waited_for_state,
        }


@dataclass(frozen=True)
class Result:
    """One architecture. gate: engine against training forward; where it is not clean, nothing was timed.

    decode: one request, then many. jobs: the first is the one whose overhead counts.
    """

    name: str
    conditions: dict[str, Any]
    gate: Comparison
    decode: list[Speed] = field(default_factory=list)
    packs: list[Speed] = field(default_factory=list)
    jobs: list[JobTimes] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether something was compared, and all bits were equal."""
        return self.gate.compared > 0 and not self.gate.unequal

    @property
    def refusal(self) -> str:
        """Why there are no times."""
        return f"{self.name}: no times, since the engine is not right: {self.gate}"

    @property
    def decode_ratio(self) -> float:
        """Tokens a second with many requests over those with one: the median of the rounds' ratios."""
        one, many = self.decode
        return median(b / a for a, b in zip(one.rates, many.rates, strict=True))

    def as_dict(self) -> dict[str, Any]:
        """Everything, rounds included."""
        found: dict[str, Any] = {
            "architecture": self.name,
            "conditions": self.conditions,
            "gate": {"compared": self.gate.compared, "unequal": self.gate.unequal},
        }
        if self.ok:
            found["decode_ratio"] = self.decode_ratio
            found["engine_overhead"] = self.jobs[0].overhead
            found["speeds"] = {speed.name: speed.as_dict() for speed in (*self.decode, *self.packs)}
            found["jobs"] = {job.name: job.as_dict() for job in self.jobs}
        return found

    def table(self) -> Group:
        """Speeds, jobs, the two numbers that sum them up, and the conditions."""
        many = self.decode[1].name.removeprefix("decode, ")
        return Group(
            self._speeds(),
            self._jobs(),
            Text(f"decode with {many} is {self.decode_ratio:.1f} times as fast as with 1"),
            Text(
                f"{self.jobs[0].overhead:.1%} of the time of '{self.jobs[0].name}' is the engine's own: "
                "neither Model.forward nor logits and logprobs"
            ),
            Text(f"before: {self.gate.compared} logprobs compared with training, 0 unequal bits"),
            Text(", ".join(f"{key} {value}" for key, value in self.conditions.items())),
        )

    def _speeds(self) -> Table:
        table = Table(title=f"{self.name}: tokens per second, medians of {self._rounds} rounds")
        for header in ("", "tokens", "per second", "lowest", "highest"):
            table.add_column(header, justify="right" if header else "left")
        for speed in (*self.decode, *self.packs):
            rates = speed.rates
            cells = (f"{rate:.1f}" for rate in (median(rates), min(rates), max(rates)))
            table.add_row(speed.name, str(speed.tokens), *cells)
        return table

    def _jobs(self) -> Table:
        table = Table(
            title=f"{self.name}: whole jobs of the engine; tokens run, run again, found in memory"
        )
        headers = ("", "seconds", "steps", "run", "again", "found", "preempted", "waited")
        for header in headers:
            table.add_column(header, justify="right" if header else "left")
        for job in self.jobs:
            found = job.as_dict()
            counts = ("steps", "tokens_run", "tokens_recomputed", "prefix_hits", "preemptions")
            cells = (str(found[key]) for key in (*counts, "waited_for_state"))
            table.add_row(job.name, f"{found['seconds']:.2f}", *cells)
        return table

    @property
    def _rounds(self) -> int:
        return len(self.decode[0].seconds)
