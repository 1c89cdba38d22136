"""The training forward: logprobs of given tokens, packed, differentiable, and the same bits as the engine's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unified_models.context.collectives import everyones
from unified_models.context.local import LocalContext
from unified_models.context.parallel import (
    Parallel,
    ParallelContext,
    Stretch,
    StretchMemory,
    stretches,
)
from unified_models.context.step import Step, owners
from unified_models.model import LanguageModel
from unified_models.ops.logprob import check_provider
from unified_models.ops.logprob import logprobs as logprobs_of
from unified_models.unchanged import unchanged

ALONE = Parallel()
ROWS = 2048
"""Of logits held at once, by default: 1 GiB of a vocabulary of 131,072."""


def logprobs(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    temperature: float | Sequence[float] = 1.0,
    *,
    recompute: bool = False,
    rows: int = ROWS,
    provider: str = "torch_row",
    context: Callable[..., Any] | None = None,
    parallel: Parallel = ALONE,
) -> list[Tensor]:
    """log p(token i | tokens before i) for i = 1 .. of each sequence, at `temperature` (one, or one a sequence).

    All sequences run in one pack without padding. Returns float32 tensors of length len(sequence) - 1, empty for
    sequences of length 0 and 1; differentiable with respect to the masters.

    recompute: activation checkpointing by block; the bits stay. rows: how many rows of logits exist at once, forward
    and backward; the bits do not depend on it. provider: the sampler's arithmetic, of ops.logprob.PROVIDERS. context:
    called as `LocalContext` is, or as `ParallelContext` where `parallel` is given; None: those. parallel: the processes
    that share the experts or the pack. Every process of `parallel.tokens` gives the same sequences and gets all their
    logprobs; the gradients of its own stretch of tokens are its own, and those of all processes are to be added. A
    process without sequences gives one that is empty, and takes part: its gradients are zeros.

    Raises ValueError for token ids outside the vocabulary, temperatures that are not positive numbers, and a context
    that takes no `parallel` where one is given. The backward raises RuntimeError, on every process, where a master
    changed since the forward.
    """
    temperatures = (
        [temperature] * len(sequences)
        if isinstance(temperature, int | float)
        else list(temperature)
    )
    check(model, sequences, temperatures, rows)
    check_context(context, parallel)
    check_provider(provider)
    device = next(chain(model.parameters(), model.buffers())).device
    pack = Pack.of(sequences, temperatures, parallel.stretches, device)
    ctx, mine = pack.context(context, parallel)
    with Recomputed(model.blocks if recompute else ()):  # type: ignore[arg-type]
        hidden_TM = model(pack.ids_T[mine], ctx)
    sources, score = pack.scored(mine), partial(scores, model, ctx, provider)
    parts = [hidden_TM[:0, 0].float()]  # a pack without a scored token has gradients too: zeros
    for chunk in sources.split(rows):
        at = chunk + mine.start
        args: tuple[Any, ...] = (hidden_TM[chunk], pack.temperatures(at), pack.ids_T[at + 1], [])
        parts.append(
            checkpoint(score, *args, use_reentrant=False, context_fn=ctx.again)
            if torch.is_grad_enabled()
            else score(*args)
        )
    lps = torch.cat(parts)
    if parallel.tokens is not None:
        counts = [len(pack.scored(slice(s.start, s.end))) for s in pack.stretches]
        lps = everyones(lps, counts, parallel.tokens)
    lps = unchanged(lps, model, parallel.groups)
    return list(lps.split([max(len(s) - 1, 0) for s in sequences]))


def scores(
    model: LanguageModel,
    ctx: Any,
    provider: str,
    hidden_TM: Tensor,
    temperature_T: Tensor | None,
    ids_T: Tensor,
    told: list[Tensor],
) -> Tensor:
    """Logprobs of a chunk of rows. told: nothing at first, then what was told: a backward asks again for the logits
    alone."""
    known_T = told[0] if told else None
    logits_TV = model.logits(hidden_TM, ctx)
    lps_T = logprobs_of(logits_TV, temperature_T, ids_T, provider=provider, known_T=known_T)
    told[:] = [lps_T.detach()]
    return lps_T


@dataclass(frozen=True)
class Pack:
    """Sequences one behind the other, and the stretches of tokens that processes run.

    Where there are fewer tokens than processes, sequences of one token follow, which nobody scores. temperature_T:
    float32; None where all are 1.
    """

    lengths: list[int]
    ids_T: Tensor
    temperature_T: Tensor | None
    stretches: list[Stretch]

    @classmethod
    def of(
        cls,
        sequences: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        processes: int,
        device: torch.device,
    ) -> "Pack":
        missing = max(processes - sum(map(len, sequences)), 0)
        sequences, temperatures = [*sequences, *[[0]] * missing], [*temperatures, *[1.0] * missing]
        lengths = [len(s) for s in sequences]
        ids = [token for s in sequences for token in s]
        ids_T, temperature_T = torch.tensor(ids, dtype=torch.int64, device=device), None
        if any(temperature != 1 for temperature in temperatures):
            of_each = torch.tensor(temperatures, dtype=torch.float32, device=device)
            temperature_T = of_each[owners(torch.tensor(lengths, device=device))]
        return cls(lengths, ids_T, temperature_T, stretches(lengths, processes))

    def context(
        self, context: Callable[..., Any] | None, parallel: Parallel
    ) -> tuple[LocalContext, slice]:
        """What runs this process's part, and which tokens of the pack it is."""
        device, group = self.ids_T.device, parallel.tokens
        if parallel.alone:
            step = Step.of(self.lengths, device=device)
            return (context or LocalContext)(step), slice(0, len(self.ids_T))
        context = context or ParallelContext
        if group is None:
            step = Step.of(self.lengths, device=device)
            return context(step, parallel=parallel), slice(0, len(self.ids_T))
        memory = StretchMemory(self.stretches, self.lengths, group)
        mine = memory.mine
        step = mine.step(device)
        return context(step, memory, parallel=parallel), slice(mine.start, mine.end)

    def temperatures(self, rows: Tensor) -> Tensor | None:
        """Of these tokens; None where all are 1."""
        return None if self.temperature_T is None else self.temperature_T[rows]

    def scored(self, part: slice) -> Tensor:
        """Of a stretch, its rows that score the token after: of the same sequence, wherever it runs; int64."""
        starts = torch.tensor([0, *self.lengths], device=self.ids_T.device).cumsum(0)
        begins = torch.zeros(len(self.ids_T) + 1, dtype=torch.bool, device=self.ids_T.device)
        begins[starts] = True  # also the end of the pack
        return (~begins[part.start + 1 : part.stop + 1]).nonzero()[:, 0]


def check(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    temperatures: Sequence[float],
    rows: int,
) -> None:
    """Refuse bad arguments before anything runs."""
    if len(temperatures) != len(sequences):
        raise ValueError(f"temperature: {len(temperatures)} values for {len(sequences)} sequences")
    for i, value in enumerate(temperatures):
        if not 0 < value < float("inf"):
            raise ValueError(
                f"temperature of sequence {i} is {value}; it must be a positive number (greedy is 1.0)"
            )
    if rows < 1:
        raise ValueError(f"rows = {rows}; at least 1")
    vocab = model.config.vocab_size
    for i, sequence in enumerate(sequences):
        for j, token in enumerate(sequence):
            if not 0 <= token < vocab:
                raise ValueError(f"sequence {i}, token {j}: id {token} is not in [0, {vocab})")


def check_context(context: Callable[..., Any] | None, parallel: Parallel) -> None:
    """Refuse a context that would leave the other processes alone."""
    if context is None or parallel.alone:
        return
    taken = signature(context).parameters.values()
    if not any(p.name == "parallel" or p.kind is Parameter.VAR_KEYWORD for p in taken):
        raise ValueError(
            f"context {getattr(context, '__name__', context)!r} takes no `parallel`, and parallel is {parallel}; "
            "give one that is called as ParallelContext is"
        )


class Recomputed:
    """Blocks keep no activations while this lasts: each runs again in the backward, under the same context, which
    then shows no notes.

    A block's last argument is its context.
    """

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks

    def __enter__(self) -> None:
        for block in self.blocks:
            forward = block.forward
            block.forward = lambda *args, _forward=forward: checkpoint(
                _forward, *args, use_reentrant=False, context_fn=args[-1].again
            )

    def __exit__(self, *_: object) -> None:
        for block in self.blocks:
            del block.forward
