"""The training forward: logprobs of given tokens, packed, differentiable, and the same bits as the engine's."""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.model import LanguageModel
from unified_models.ops.logprob import check_provider
from unified_models.ops.logprob import logprobs as logprobs_of

ROWS = 256  # of logits held at once


def logprobs(
    model: LanguageModel,
    sequences: Sequence[Sequence[int]],
    temperature: float | Sequence[float] = 1.0,
    *,
    recompute: bool = False,
    rows: int = ROWS,
    provider: str = "torch_row",
    context: Callable[..., Any] = LocalContext,
) -> list[Tensor]:
    """log p(token i | tokens before i) for i = 1 .. of each sequence, at `temperature` (one, or one a sequence).

    All sequences run in one pack without padding. Returns float32 tensors of length len(sequence) - 1, empty for
    sequences of length 0 and 1; differentiable with respect to the masters.

    recompute: activation checkpointing by block; the bits stay. rows: how many rows of logits exist at once, forward
    and backward; the bits do not depend on it. provider: the sampler's arithmetic, of ops.logprob.PROVIDERS. context:
    the context class to run under.

    Raises ValueError for token ids outside the vocabulary and temperatures that are not positive numbers.
    """
    temperatures = (
        [temperature] * len(sequences)
        if isinstance(temperature, int | float)
        else list(temperature)
    )
    check(model, sequences, temperatures, rows)
    check_provider(provider)
    device = next(chain(model.parameters(), model.buffers())).device
    step = Step.of([len(s) for s in sequences], device=device)
    if step.num_tokens == 0:
        return [torch.zeros(0, device=device) for _ in sequences]
    ids_T = torch.tensor(
        [token for s in sequences for token in s], dtype=torch.int64, device=device
    )
    ctx = context(step)
    with _Recomputed(model.blocks if recompute else ()):  # type: ignore[arg-type]
        hidden_TM = model(ids_T, ctx)
    scored = step.positions_T[1:] > 0  # row t scores token t + 1 of the same sequence
    sources = scored.nonzero()[:, 0]
    temperature_T = torch.tensor(temperatures, dtype=torch.float32, device=device)[step.sequence_T]

    def score(hidden: Tensor, temperature: Tensor, targets: Tensor) -> Tensor:
        return logprobs_of(model.logits(hidden, ctx), temperature, targets, provider=provider)

    parts = [hidden_TM.new_zeros(0, dtype=torch.float32)]
    for chunk in sources.split(rows):
        args = (hidden_TM[chunk], temperature_T[chunk], ids_T[chunk + 1])
        parts.append(
            checkpoint(score, *args, use_reentrant=False)
            if torch.is_grad_enabled()
            else score(*args)
        )
    return list(torch.cat(parts).split([max(len(s) - 1, 0) for s in sequences]))


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


class _Recomputed:
    """Blocks keep no activations while this lasts: each runs again in the backward, under the same context."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks

    def __enter__(self) -> None:
        for block in self.blocks:
            forward = block.forward
            block.forward = lambda *args, _forward=forward: checkpoint(
                _forward, *args, use_reentrant=False
            )

    def __exit__(self, *_: object) -> None:
        for block in self.blocks:
            del block.forward
