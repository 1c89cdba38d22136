"""The control: a fault of one unit in the last place must be found, or equal bits would prove nothing."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from unified_models.model import LanguageModel
from unified_models.training import logprobs
from unified_models.verify.compare import UnequalError, bits
from unified_models.verify.drive import drive
from unified_models.verify.locate import Agreement, compare
from unified_models.verify.trace import Call, Fault, Place, Trace, recording
from unified_models.verify.watch import Watch


@dataclass(frozen=True)
class Injection:
    """A fault, what the finder named, and how many logprobs changed."""

    fault: Fault
    named: tuple[Call, Place] | None
    unequal: int

    @property
    def found(self) -> bool:
        return self.named == (self.fault.call, self.fault.place)


@dataclass(frozen=True)
class Control:
    """clean: the two sides without a fault; both must agree in every operator, or no fault could be named."""

    clean: Agreement
    injections: list[Injection]
    blind: list[Call]

    @property
    def reached(self) -> list[Injection]:
        return [injection for injection in self.injections if injection.unequal]

    def faults(self) -> Iterator[str]:
        """Why the control does not hold."""
        if self.clean.first is not None:
            call, (sequence, position) = self.clean.first
            yield f"control: without a fault, the sides part at {call}, sequence {sequence} token {position}"
        if not self.injections:
            yield "control: no fault could be injected"
        for injection in self.injections:
            if not injection.found:
                call, place = injection.fault.call, injection.fault.place
                named = (
                    "nothing"
                    if injection.named is None
                    else f"{injection.named[0]} token {injection.named[1][1]}"
                )
                yield f"control: a fault in {call} token {place[1]} was not named, but {named}"
        if self.injections and not self.reached:
            yield "control: no injected fault reached the logprobs"
        yield from (f"control: {call} returns no row for each token" for call in self.blind)

    def __str__(self) -> str:
        found = sum(injection.found for injection in self.injections)
        reached = ", ".join(
            dict.fromkeys(injection.fault.call.operator for injection in self.reached)
        )
        return (
            f"{self.clean.rows} rows of {self.clean.calls} operator calls agree; one-ulp faults: named {found} of "
            f"{len(self.injections)}, reached the logprobs: {reached or 'none'}"
        )


@torch.no_grad()
def control(model: LanguageModel, sequence: Sequence[int], seed: int = 0) -> Control:
    """Inject one fault into each kind of operator, at a random place of the training forward, and look for it against
    a run of the same sequence in two steps."""
    random = Random(f"control {seed}")
    first = random.randrange(1, len(sequence) - 1)

    def trained(trace: Trace) -> Tensor:
        with recording(model, trace):
            return logprobs(model, [sequence], context=Watch(model, trace=trace).pack([0]))[0]

    with recording(model, steps := Trace()):
        watch = Watch(model, trace=steps)
        expected = drive(watch, [0], [sequence], lambda at, left: left if at else first)[0]
    clean = Trace()
    trained(clean)
    agreement = compare(clean, steps)
    injections = []
    for fault in faults(clean, len(sequence) - 1, random):
        struck = Trace(fault=fault)
        values = trained(struck)
        if not struck.struck:
            raise UnequalError(f"the fault in {fault.call} was never met")
        unequal = bits(expected, values.cpu()).unequal
        injections.append(Injection(fault, compare(struck, steps).first, unequal))
    return Control(agreement, injections, sorted(clean.blind, key=str))


def faults(clean: Trace, length: int, random: Random) -> Iterator[Fault]:
    """One for each kind of operator: a random call of it, and a random token of the last quarter that was digested,
    among the first `length`, which both sides run."""
    by_operator: dict[str, list[Call]] = {}
    for call, known in clean.digests.items():
        if any(position < length for _, position in known):
            by_operator.setdefault(call.operator, []).append(call)
    for calls in by_operator.values():
        call = random.choice(calls)
        places = sorted(place for place in clean.digests[call] if place[1] < length)
        yield Fault(call, random.choice(places[-max(1, len(places) // 4) :]))
