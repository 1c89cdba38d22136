"""Contexts that are looked at while they run: they count, and tell a trace who is in each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unified_models.context.local import LocalContext
from unified_models.context.memory import Memory
from unified_models.context.slots import Entries, State
from unified_models.context.step import Step
from unified_models.engine import Engine
from unified_models.engine.memory import StepMemory
from unified_models.model import LanguageModel
from unified_models.verify.counters import Counters, chunks, strides
from unified_models.verify.trace import Trace

PAGES = (1, 2, 4, 8, 16, 32)  # tokens
Factory = Callable[..., Any]
"""context(step, memory=None)"""


def page_sizes(model: LanguageModel) -> list[int]:
    """Sizes of pages on which an engine can keep what the model remembers: the two largest of `PAGES` that divide every
    scan chunk, and divide or are whole numbers of every stride."""
    slots = list(model.slots().values())
    whole = [slot.chunk for slot in slots if isinstance(slot, State)]
    either = [slot.stride for slot in slots if isinstance(slot, Entries)]
    fit = [
        page
        for page in PAGES
        if not any(chunk % page for chunk in whole)
        and not any(page % stride and stride % page for stride in either)
    ]
    return fit[-2:]


@dataclass
class Watch:
    """Makes the contexts of the runs of one model.

    base: the context class. trace: of the runs, under `recording`. notes: names of what contexts have noted.
    """

    model: LanguageModel
    counters: Counters = field(default_factory=Counters)
    base: Callable[..., Any] = LocalContext
    trace: Trace | None = None
    notes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.pages, self.chunks = page_sizes(self.model), chunks(self.model)
        self._strides = strides(self.model)
        self.page = max([self.pages[0], *self._strides])
        """tokens of the largest page that memory for a number of tokens is cut into"""
        self._engines: list[Engine] = []

    def pack(self, sequences: Sequence[int]) -> Factory:
        """Contexts of steps that hold these sequences, in this order."""
        return lambda step, memory=None: self._context(step, memory, sequences)

    def engine(self, numbers: Sequence[int], **options: Any) -> Engine:
        """An engine whose n-th request is about sequence numbers[n]; on the smaller `pages` unless told otherwise."""
        progress = Progress(self.chunks, self.counters)

        def factory(step: Step, memory: Memory) -> Any:
            assert isinstance(memory, StepMemory)
            owners = {request.seat: request.number for request in engine.running}
            requests = [owners[seat] for seat in memory.seats_S.tolist()]
            progress.add(step, requests, engine.stats.updates)
            return self._context(step, memory, [numbers[request] for request in requests])

        options = {"page_tokens": self.pages[0]} | options
        engine = Engine(self.model, context=factory, **options)
        self._engines.append(engine)
        return engine

    def finish(self) -> None:
        """Take over what the engines have counted."""
        for engine in self._engines:
            self.counters.add_stats(engine.stats)
        self._engines.clear()

    def _context(self, step: Step, memory: Memory | None, sequences: Sequence[int]) -> Any:
        self.counters.add_step(step, self._strides, self.chunks)
        if self.trace is not None:
            self.trace.begin(step, sequences)
        return self.base(step, memory, self._note)

    def _note(self, _site: nn.Module, name: str, value: Any) -> None:
        self.notes.add(name)
        self.counters.add_note(name, value)


class Progress:
    """How far the requests of one engine have come, read off its steps.

    One that does not go on where it was has given way, amid a chunk or not, or has just begun; if it does not begin at
    its first token, the tokens before were found in memory, and no scan state is found but at a multiple of its chunk.
    """

    def __init__(self, chunks: Sequence[int], counters: Counters) -> None:
        self.chunks, self.counters = chunks, counters
        self._reached: dict[int, int] = {}
        self._updates = 0

    def add(self, step: Step, requests: Sequence[int], updates: int) -> None:
        """The requests of a step, in its order; updates: of the engine's weights, after which all are run again."""
        if updates != self._updates:
            self._reached.clear()
            self._updates = updates
        for request, past, length in zip(requests, step.past, step.lengths, strict=True):
            before = self._reached.get(request, 0)
            self._reached[request] = past + length
            if past == before:
                continue
            self.counters.preempted_open += any(before % chunk for chunk in self.chunks)
            self.counters.state_hits += bool(past and self.chunks)
            for chunk in self.chunks:
                assert past % chunk == 0, f"{past} tokens found in memory, with a chunk of {chunk}"
