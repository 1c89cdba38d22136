"""What every operator returned for every token, as digests: one run, in program order.

Values that plain tensor code makes between two operators belong to the later one: a fault lies in the operator that
is named, or on the way to it.
"""

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from unified_models.context.interface import Pool
from unified_models.context.memory import closed
from unified_models.context.step import Step
from unified_models.model import LanguageModel
from unified_models.ops.operator import observe
from unified_models.verify.compare import patterns
from unified_models.verify.digest import digest
from unified_models.weight import Table, Weight

AFTER = "logits"
"""The path of operators that run on the rows that are read, after the model's forward."""
Place = tuple[int, int]
"""(sequence, position) of a token."""


@dataclass(frozen=True)
class Call:
    """The `number`-th call of an operator under a module path in one forward, from 0."""

    path: str
    operator: str
    number: int = 0

    def __str__(self) -> str:
        number = f" (call {self.number + 1})" if self.number else ""
        return f"{self.path or 'model'} {self.operator}{number}"


@dataclass(frozen=True)
class Fault:
    """One unit in the last place, on every element of what an operator returns for one token."""

    call: Call
    place: Place


@dataclass
class Trace:
    """One run. digests: by call, in program order, and by place; a token that several steps bring, as after a
    preemption, has one digest for all of its values unless they are the same.

    keep: the one row of which the values are kept. fault: what is done to one row of the run.
    """

    keep: tuple[Call, Place] | None = None
    fault: Fault | None = None
    digests: dict[Call, dict[Place, int]] = field(default_factory=lambda: defaultdict(dict))
    kept: list[list[Tensor]] = field(default_factory=list)
    blind: set[Call] = field(default_factory=set)
    """calls whose output has no row for each token"""
    struck: bool = False
    """whether the fault was met"""

    def __post_init__(self) -> None:
        self._step, self._sequences = Step.of([]), list[int]()
        self._places = list[Place]()
        self._path = list[str]()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._hidden: dict[int, list[Place]] = {}

    def begin(self, step: Step, sequences: Sequence[int]) -> None:
        """A step starts; `sequences` names those in it. The context factory of the run calls this."""
        self._step, self._sequences = step, list(sequences)
        pairs = zip(step.sequence_T.tolist(), step.positions_T.tolist(), strict=True)
        self._places = [(self._sequences[s], p) for s, p in pairs]
        self._counts.clear()

    def see(self, name: str, out: Any) -> Any:
        """The observer of operators."""
        path = self._path[-1] if self._path else AFTER
        call = Call(path, name, self._counts[path, name])
        self._counts[path, name] += 1
        places, at = self._rows(out)
        leaves = _leaves(out, len(self._places))
        if not leaves:
            self.blind.add(call)
        if self.fault is not None and self.fault.call == call and self.fault.place in places:
            row = at[places.index(self.fault.place)]
            out, self.struck = _struck(out, leaves, row), True
            leaves = _leaves(out, len(self._places))
        known = self.digests[call]
        if leaves and places:
            for place, value in zip(
                places, digest([leaf[at] for leaf in leaves]).tolist(), strict=True
            ):
                before = known.setdefault(place, value)
                known[place] = value if before == value else hash((before, value))
        if self.keep is not None and self.keep[0] == call and self.keep[1] in places:
            row = at[places.index(self.keep[1])]
            self.kept.append([leaf[row].detach().clone() for leaf in leaves])
        return out

    def _rows(self, out: Any) -> tuple[list[Place], list[int]]:
        """The places that an output is about, and the rows where they are. A pool is about the entries that close in
        this step, each at the token that closes it."""
        if not isinstance(out, Pool):
            return self._places, list(range(len(self._places)))
        first_S, counts_S = closed(self._step, out.slot)
        places, at = [], []
        for s, (first, count) in enumerate(zip(first_S.tolist(), counts_S.tolist(), strict=True)):
            for w in range(first, first + count):
                places.append((self._sequences[s], (w + 1) * out.slot.stride - 1))
                at.append(int(out.readable.base_S[s]) + w)
        return places, at

    def enter(self, path: str) -> None:
        """A module's forward starts."""
        self._path.append(path)

    def leave(self) -> None:
        """A module's forward is over, or failed."""
        self._path.pop()

    def ends(self, hidden_TM: Tensor) -> None:
        """The model's forward is over; its rows will be known again by their bits."""
        self._hidden = defaultdict(list)
        for place, value in zip(self._places, digest([hidden_TM]).tolist(), strict=True):
            self._hidden[value].append(place)

    def reads(self, hidden_NM: Tensor) -> None:
        """The operators to come see these rows. Equal rows are told apart by the order in which they are read."""
        self._places = []
        for value in digest([hidden_NM]).tolist():
            candidates = self._hidden[value]
            self._places.append(candidates.pop(0) if len(candidates) > 1 else candidates[0])
        self._counts.clear()


def _leaves(out: Any, count: int) -> list[Tensor]:
    """The tensors of an output that have a row for each of `count` tokens, or that hold a pool's entries."""
    if isinstance(out, Pool):
        return [out.readable.rows_RD]
    tensors = [out] if isinstance(out, Tensor) else [x for x in out if isinstance(x, Tensor)]
    return [x for x in tensors if x.dim() and len(x) == count]


def _struck(out: Any, leaves: list[Tensor], row: int) -> Any:
    """`out` with one row of its leaves changed."""

    def changed(x: Any) -> Any:
        if not any(x is leaf for leaf in leaves):
            return x
        x = x.clone()
        x[row] = one_ulp(x[row])
        return x

    if isinstance(out, Pool):
        kept = out.readable
        kept = dataclasses.replace(kept, rows_RD=changed(kept.rows_RD))
        return dataclasses.replace(out, kept=kept)
    return changed(out) if isinstance(out, Tensor) else tuple(changed(x) for x in out)


def one_ulp(row: Tensor) -> Tensor:
    """Every element one unit in the last place further from zero. Whole numbers are choices: the same ones in reverse
    order, or another one where that is no change."""
    if row.is_floating_point():
        return (patterns(row) + 1).view(row.dtype).view(row.shape)
    reverse = row.flip(-1)
    return reverse if not torch.equal(reverse, row) else torch.where(row > 0, row - 1, row + 1)


@contextmanager
def recording(model: LanguageModel, trace: Trace) -> Iterator[Trace]:
    """Show every operator of the model to `trace` while the block runs; module paths by hooks, which are removed."""
    logits = model.logits

    def read(hidden_NM: Tensor, ctx: Any) -> Tensor:
        trace.reads(hidden_NM)
        return logits(hidden_NM, ctx)

    def leave(is_root: bool, _module: Any, _args: Any, out: Any) -> None:
        trace.leave()
        if is_root and isinstance(out, Tensor):
            trace.ends(out)

    with ExitStack() as stack:
        for path, module in model.named_modules():
            if isinstance(module, Weight | Table):
                continue
            enter: Callable[..., None] = functools.partial(_enter, trace, path)
            stack.callback(module.register_forward_pre_hook(enter).remove)
            left = functools.partial(leave, module is model)
            stack.callback(module.register_forward_hook(left, always_call=True).remove)
        vars(model)["logits"] = read
        stack.callback(vars(model).pop, "logits")
        stack.enter_context(observe(trace.see))
        yield trace


def _enter(trace: Trace, path: str, *_: Any) -> None:
    trace.enter(path)
