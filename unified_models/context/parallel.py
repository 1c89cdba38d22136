"""The context over several processes: experts live apart (EP), and one pack's tokens may (CP). Rows move; sums do not.

EP: rows go to the process that holds their expert and come back; each token's answers are added where the token is, in
slot order. CP: the pack is cut into as many stretches of tokens as there are processes, at any token. A process runs
its stretch as a step that has a past: what earlier processes wrote is in its memory, because all rows are gathered
there. A scan's state passes from process to process.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from unified_models.context.collectives import (
    Group,
    all_gather_single,
    everyones,
    exchange,
    from_previous,
    gather,
    to_next,
)
from unified_models.context.interface import Experts
from unified_models.context.local import LocalContext
from unified_models.context.memory import Memory, Readable, closed
from unified_models.context.slots import Entries, Rows, State
from unified_models.context.step import Step
from unified_models.formats import round_trip


@dataclass(frozen=True)
class Parallel:
    """Process groups: `experts` holds each expert once, `tokens` holds a pack once. None: alone.

    Every process of a group runs every step, with or without tokens of its own.
    """

    experts: Group = None
    tokens: Group = None

    @property
    def alone(self) -> bool:
        return self.experts is None and self.tokens is None

    @property
    def groups(self) -> list[Group]:
        """Those that are given."""
        return [group for group in (self.experts, self.tokens) if group is not None]

    @property
    def stretches(self) -> int:
        """Processes that share a pack."""
        return 1 if self.tokens is None else dist.get_world_size(self.tokens)


@dataclass(frozen=True)
class Stretch:
    """One process's part of a pack: tokens [start, end) of it, of sequences `first`, first + 1, ..."""

    start: int
    end: int
    first: int
    lengths: tuple[int, ...]
    past: tuple[int, ...]

    def step(self, device: torch.device | str) -> Step:
        return Step.of(self.lengths, self.past, device)


def stretches(lengths: Sequence[int], count: int) -> list[Stretch]:
    """A pack cut into `count` stretches whose numbers of tokens differ by one at most."""
    total, cuts = sum(lengths), []
    for r in range(count):
        start, end = r * total // count, (r + 1) * total // count
        at, first = 0, None
        parts: list[tuple[int, int]] = []
        for s, length in enumerate(lengths):
            low, high = max(start - at, 0), min(end - at, length)
            between = length == 0 and bool(parts) and at < end  # it has a number, too
            if low < high or between:
                first = s if first is None else first
                parts.append((high - low, low))
            at += length
        cuts.append(
            Stretch(start, end, first or 0, tuple(n for n, _ in parts), tuple(p for _, p in parts))
        )
    return cuts


class ParallelContext(LocalContext):
    """`LocalContext` over the groups of a `Parallel`."""

    def __init__(
        self,
        step: Step,
        memory: Memory | None = None,
        onlooker: Callable[[nn.Module, str, Any], None] | None = None,
        *,
        parallel: Parallel,
    ) -> None:
        super().__init__(step, memory, onlooker)
        self.parallel = parallel

    def scan(self, *args: Any, **kwargs: Any) -> Tensor:
        """See `interface.Context`; what later processes need of the states is on its way when it returns."""
        y_THP: Tensor = super().scan(*args, **kwargs)
        return self.memory.passed_on(y_THP) if isinstance(self.memory, StretchMemory) else y_THP

    def _answers(self, rows_PM: Tensor, counts: Tensor, experts: Experts) -> Tensor:
        group = self.parallel.experts
        if group is None:
            return super()._answers(rows_PM, counts, experts)
        size, rank, held = dist.get_world_size(group), dist.get_rank(group), experts.up.shape[0]
        assert held * size == len(counts), f"{held} experts on each of {size}, {len(counts)} in all"
        counts_RE = counts.new_empty(size, len(counts))
        all_gather_single(counts_RE, counts[None].contiguous(), group=group)
        send = counts.view(size, held).sum(1).tolist()
        mine_RE = counts_RE[:, rank * held : (rank + 1) * held]
        receive = mine_RE.sum(1).tolist()
        came = exchange(rows_PM, send, receive, group)
        # They came process by process, each sorted by expert; the experts want them expert by expert.
        of_RE = torch.arange(held, device=counts.device).repeat(size)
        order = of_RE.repeat_interleave(mine_RE.flatten()).argsort(stable=True)
        answers = super()._answers(came[order], mine_RE.sum(0), experts)
        back = torch.empty_like(order).scatter_(
            0, order, torch.arange(len(order), device=order.device)
        )
        return exchange(answers[back], receive, send, group)


@dataclass
class StretchMemory:
    """The memory of a process's stretch of a pack: all processes' rows, gathered as each writes its own.

    all_: every process's stretch; lengths: of the whole pack's sequences.
    """

    all_: Sequence[Stretch]
    lengths: Sequence[int]
    group: Group
    _state: Tensor | None = field(default=None)

    @property
    def mine(self) -> Stretch:
        return self.all_[dist.get_rank(self.group)]

    def rows(
        self, step: Step, slot: Rows, new_TD: Tensor, scales_D: Tensor | None = None
    ) -> Readable:
        """See `memory.Memory`."""
        kept = round_trip(new_TD, slot.record, scales_D)
        counts = [stretch.end - stretch.start for stretch in self.all_]
        return Readable(gather(kept, counts, self.group), self._bases(step, self.lengths))

    def entries(self, step: Step, slot: Entries, new_UD: Tensor) -> Readable:
        """See `memory.Memory`."""
        kept = round_trip(new_UD, slot.record)
        counts = [int(closed(each.step("cpu"), slot)[1].sum()) for each in self.all_]
        of_sequences = [length // slot.stride for length in self.lengths]
        return Readable(gather(kept, counts, self.group), self._bases(step, of_sequences))

    def _bases(self, step: Step, counts: Sequence[int]) -> Tensor:
        first, here = self.mine.first, len(self.mine.lengths)
        bases = [sum(counts[:s]) for s in range(first, first + here)]
        return torch.tensor(bases, dtype=torch.int64, device=step.device)

    def states(self, step: Step, slot: State) -> Tensor:
        """See `memory.Memory`. The first sequence's comes from the process before, where it begins there."""
        shape = (len(step.lengths), *slot.shape)
        states = torch.zeros(shape, dtype=torch.float32, device=step.device)
        self._state = states[-1]
        if not self.mine.past or not self.mine.past[0]:
            return states
        like = torch.zeros(slot.shape, dtype=torch.float32, device=step.device)
        came = from_previous(like.requires_grad_(torch.is_grad_enabled()), self.group)
        if len(step.lengths) == 1:
            self._state = came
        return torch.cat((came[None], states[1:]))

    def keep_states(self, step: Step, slot: State, new_UHPN: Tensor) -> None:
        """See `memory.Memory`. What the next process needs is the last sequence's newest."""
        if step.total_S[-1] // slot.chunk > step.past_S[-1] // slot.chunk:
            self._state = new_UHPN[-1]

    def passed_on(self, y_THP: Tensor) -> Tensor:
        """y, after the state went to the next process, where the last sequence goes on there."""
        mine, state = self.mine, self._state
        assert state is not None, "states were not asked for"
        last = mine.first + len(mine.lengths) - 1
        self._state = None
        if mine.past[-1] + mine.lengths[-1] == self.lengths[last]:
            return y_THP
        return to_next(y_THP, state, self.group)


def hold_experts(experts: nn.Module, rank: int, size: int) -> None:
    """Keep every `size`-th stretch of the experts of each `Experts` in a model, before it is filled.

    ValueError: the number of experts is no multiple of size, or rank is not in [0, size).
    """
    if not 0 <= rank < size:
        raise ValueError(f"experts: process {rank} of {size}")
    for module in experts.modules():
        if not isinstance(module, Experts):
            continue
        if module.num_experts % size:
            raise ValueError(f"{module.num_experts} experts do not divide over {size} processes")
        held = module.num_experts // size
        for weight in (module.gate, module.up, module.down):
            if weight is not None:
                weight.hold(rank * held, held)


__all__ = [
    "Parallel",
    "ParallelContext",
    "Stretch",
    "StretchMemory",
    "everyones",
    "hold_experts",
    "stretches",
]
