"""Microbatches of sequences through Megatron's schedules: logprobs, their loss, and a step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """Sequences that run in one pack. All processes of a pipeline and of a context-parallel group have the same.

    given: whatever the loss needs.
    """

    sequences: Sequence[Sequence[int]]
    temperature: float | Sequence[float] = 1.0
    given: Any = None


Loss = Callable[[list[Tensor], Microbatch], tuple[Tensor, int, Any]]
"""Of the logprobs of a microbatch, float32 [length - 1] a sequence: a sum over tokens, float32 []; how many tokens; and
anything to be told."""


def forward_step(loss: Loss) -> Callable[..., tuple[Tensor, Callable[..., Any]]]:
    """The function that Megatron's schedules ask for: (iterator of microbatches, stage) -> (output, what makes a loss
    of it)."""

    def step(batches: Iterator[Microbatch], stage: Any) -> tuple[Tensor, Callable[..., Any]]:
        batch = next(batches)
        return stage(batch.sequences, batch.temperature), partial(score, batch)

    def score(batch: Microbatch, lps_N: Tensor, non_loss_data: bool = False) -> Any:
        lps = list(lps_N.split([max(len(s) - 1, 0) for s in batch.sequences]))
        if non_loss_data:
            return lps
        total, tokens, told = loss(lps, batch)
        # Every process of a context-parallel group has the whole loss; the tokens are counted once.
        counted = tokens if parallel_state.get_context_parallel_rank() == 0 else 0
        return total, torch.tensor(counted, dtype=torch.int, device=total.device), told

    return step


def run(
    stages: Sequence[DistributedDataParallel],
    batches: Sequence[Microbatch],
    loss: Loss,
    *,
    forward_only: bool = False,
    **more: Any,
) -> list[Any]:
    """Forward and backward of microbatches; on the last stage, what the loss told of each. more: of the schedule.

    All processes of a data-parallel group need the same number of microbatches.
    """
    iterators = [iter(batches) for _ in stages]
    schedule = get_forward_backward_func()
    told: list[Any] = schedule(
        forward_step_func=forward_step(loss),
        data_iterator=iterators if len(stages) > 1 else iterators[0],
        model=list(stages),
        num_microbatches=len(batches),
        seq_length=1,  # stages tell each other shapes
        micro_batch_size=1,
        forward_only=forward_only,
        **more,
    )
    return told


def step(
    stages: Sequence[DistributedDataParallel],
    optimizer: MegatronOptimizer,
    batches: Sequence[Microbatch],
    loss: Loss,
) -> tuple[list[Any], float | None]:
    """One optimizer step on the mean loss of all tokens: what the loss told, on the last stage, and the gradients'
    norm, if it was asked for."""
    for stage in stages:
        stage.zero_grad_buffer()
    optimizer.zero_grad()
    told = run(stages, batches, loss)
    _, norm, _ = optimizer.step()
    return told, norm


@torch.no_grad()
def logprobs(
    stages: Sequence[DistributedDataParallel], batches: Sequence[Microbatch]
) -> list[list[Tensor]]:
    """Of each microbatch, each sequence's logprobs as `um.logprobs` gives them; on the last stage, elsewhere []."""

    def none(lps: list[Tensor], batch: Microbatch) -> tuple[Tensor, int, Any]:
        raise AssertionError("a forward alone asks for no loss")

    return run(stages, batches, none, forward_only=True, collect_non_loss_data=True)
