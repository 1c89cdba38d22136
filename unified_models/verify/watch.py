"""Contexts that are looked at while they run: they count, and tell a trace who is in each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from unified_models.context.local import LocalContext
from unified_models.context.memory import Memory
from unified_models.context.step import Step
from unified_models.engine import Engine
from unified_models.engine.memory import StepMemory
from unified_models.model import LanguageModel
from unified_models.verify.counters import Counters, strides
from unified_models.verify.trace import Trace

Factory = Callable[..., Any]
"""context(step, memory=None)"""


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
        self._strides = strides(self.model)
        self._engines: list[Engine] = []

    def pack(self, sequences: Sequence[int]) -> Factory:
        """Contexts of steps that hold these sequences, in this order."""
        return lambda step, memory=None: self._context(step, memory, sequences)

    def engine(self, numbers: Sequence[int], **options: Any) -> Engine:
        """An engine whose n-th request is about sequence numbers[n]."""

        def factory(step: Step, memory: Memory) -> Any:
            sequences: list[int] = []
            if self.trace is not None:
                assert isinstance(memory, StepMemory)
                owners = {request.seat: request.number for request in engine.running}
                sequences = [numbers[owners[seat]] for seat in memory.seats_S.tolist()]
            return self._context(step, memory, sequences)

        engine = Engine(self.model, context=factory, **options)
        self._engines.append(engine)
        return engine

    def finish(self) -> None:
        """Take over what the engines have counted."""
        for engine in self._engines:
            self.counters.add_stats(engine.stats)
        self._engines.clear()

    def _context(self, step: Step, memory: Memory | None, sequences: Sequence[int]) -> Any:
        self.counters.add_step(step, self._strides)
        if self.trace is not None:
            self.trace.begin(step, sequences)
        return self.base(step, memory, self._note)

    def _note(self, _site: nn.Module, name: str, value: Any) -> None:
        self.notes.add(name)
        self.counters.add_note(name, value)
