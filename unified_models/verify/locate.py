"""Where two runs part: the first operator in program order, and the first token of it, whose bits differ."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from unified_models.verify.compare import Comparison, UnequalError, bits
from unified_models.verify.trace import Call, Place, Trace

Run = Callable[[Trace], object]
"""Runs something under `recording` with this trace; the same every time."""


@dataclass(frozen=True)
class Difference:
    """call, place: where two runs part. bits: of that row's values."""

    call: Call
    place: Place
    bits: Comparison

    def __str__(self) -> str:
        sequence, position = self.place
        text = f"{self.call}, sequence {sequence} token {position}"
        if self.bits.first is None:
            return f"{text}: other values when the token was run again"
        return f"{text}: {self.bits}"


@dataclass(frozen=True)
class Agreement:
    """How much of two runs was compared. calls: of operators; rows: what they returned for one token each."""

    calls: int
    rows: int
    first: tuple[Call, Place] | None


def compare(a: Trace, b: Trace, sequences: Iterable[int] | None = None) -> Agreement:
    """Compare the tokens that both runs have; sequences: only these.

    Raises `UnequalError` where the runs call different operators, or another order of them, or have no token in common.
    """
    calls = list(a.digests)
    for i, (x, y) in enumerate(zip(calls, b.digests, strict=False)):
        if x != y:
            raise UnequalError(f"operator call {i} is {x} in one run and {y} in the other")
    if len(calls) != len(b.digests):
        raise UnequalError(
            f"{len(calls)} operator calls in one run and {len(b.digests)} in the other"
        )
    wanted = None if sequences is None else set(sequences)
    rows, first = 0, None
    for call in calls:
        mine, other = a.digests[call], b.digests[call]
        common = [p for p in mine if p in other and (wanted is None or p[0] in wanted)]
        rows += len(common)
        if first is None:
            parted = [p for p in common if mine[p] != other[p]]
            first = (call, min(parted)) if parted else None
    if rows == 0:
        raise UnequalError(f"no row in common: nothing was compared ({len(calls)} operator calls)")
    return Agreement(len(calls), rows, first)


def locate(run_a: Run, run_b: Run, sequences: Iterable[int] | None = None) -> Difference | None:
    """The first difference of two runs, or None. Each runs once, and once more if there is one, for its bits."""
    a, b = Trace(), Trace()
    run_a(a)
    run_b(b)
    first = compare(a, b, sequences).first
    if first is None:
        return None
    a, b = Trace(keep=first), Trace(keep=first)
    run_a(a)
    run_b(b)
    pairs = [bits(x, y) for x in a.kept for y in b.kept]
    return Difference(*first, next((pair for pair in pairs if pair.unequal), pairs[0]))
