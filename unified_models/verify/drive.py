"""Any schedule at all: steps cut by the caller, over the engine's paged memory."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unified_models.context.step import Step
from unified_models.engine.memory import PagedMemory
from unified_models.ops.logprob import logprobs
from unified_models.verify.watch import Watch

Cut = Callable[[int, int], int]
"""(tokens run so far, tokens left) -> tokens of this sequence in the next step, 0 or more."""


@torch.no_grad()
def drive(
    watch: Watch, numbers: Sequence[int], sequences: Sequence[Sequence[int]], cut: Cut
) -> list[Tensor]:
    """Logprobs of tokens 1, 2, .. of each sequence, run in steps that `cut` chooses.

    numbers: of the sequences, for a trace. The last token of a sequence is not run; nothing is asked of it. A step
    that would be empty takes one token of each sequence.
    """
    if not sequences:
        return []
    targets = [max(len(s) - 1, 0) for s in sequences]
    done = [0] * len(sequences)
    parts: list[list[Tensor]] = [[torch.zeros(0)] for _ in sequences]
    memory = _memory(watch, sequences)
    while any(at < target for at, target in zip(done, targets, strict=True)):
        left = [target - at for at, target in zip(done, targets, strict=True)]
        lengths = [min(cut(at, n), n) if n else 0 for at, n in zip(done, left, strict=True)]
        if not any(lengths):
            lengths = [min(n, 1) for n in left]
        seats = [s for s, length in enumerate(lengths) if length]
        step = Step.of([lengths[s] for s in seats], [done[s] for s in seats], memory.device)
        grown = [memory.grow(s, done[s] + lengths[s]) for s in seats]
        assert all(grown), "the memory holds all sequences whole"
        pieces = [sequences[s][done[s] : done[s] + lengths[s] + 1] for s in seats]
        values = _run(watch, [numbers[s] for s in seats], step, memory, seats, pieces)
        for s, value in zip(seats, values, strict=True):
            parts[s].append(value)
            done[s] += lengths[s]
            memory.settle(s, done[s], None)
    return [torch.cat(part) for part in parts]


def _memory(watch: Watch, sequences: Sequence[Sequence[int]]) -> PagedMemory:
    """Room for all of them, poisoned."""
    longest, page = max(len(s) for s in sequences), watch.page
    return PagedMemory(
        watch.model.slots().values(),
        cache_tokens=sum(-(-max(len(s), 1) // page) * page for s in sequences),
        page_tokens=watch.pages[0],
        seats=len(sequences),
        device=next(watch.model.parameters()).device,
        step_tokens=longest,
        state_slots=len(sequences),
        poison=True,
    )


def _run(
    watch: Watch,
    numbers: Sequence[int],
    step: Step,
    memory: PagedMemory,
    seats: list[int],
    pieces: Sequence[Sequence[int]],
) -> list[Tensor]:
    """One step. pieces: the tokens of each sequence in it, and the one after."""
    ids = torch.tensor([i for piece in pieces for i in piece[:-1]], device=memory.device)
    following = torch.tensor([i for piece in pieces for i in piece[1:]], device=memory.device)
    ctx = watch.pack(numbers)(step, memory.at(step, seats))
    hidden_TM = watch.model(ids, ctx)
    ones = torch.ones(len(ids), device=memory.device)
    values = logprobs(watch.model.logits(hidden_TM, ctx), ones, following)
    return list(values.cpu().split([len(piece) - 1 for piece in pieces]))
