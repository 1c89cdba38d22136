"""A rollout against the training forward: the question that a training loop asks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unified_models.model import LanguageModel
from unified_models.training import logprobs
from unified_models.verify.compare import Comparison, Gap, bits, gap


class Sampled(Protocol):
    """What an engine returned for one prompt: ids, float32 logprobs and weight versions, one a sampled token."""

    @property
    def ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Tensor: ...

    @property
    def versions(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Rollout:
    """bits decides; gap stands beside it."""

    bits: Comparison
    gap: Gap

    def __str__(self) -> str:
        return f"{self.bits}; {self.gap}"


@torch.no_grad()
def against_training(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Sampled],
    temperature: float = 1.0,
    *,
    version: int | None = None,
) -> Rollout:
    """Compare each sampled token's logprob with the training forward over its whole prefix, all packed.

    version: of the model's weights; tokens of other versions are left out. None: all tokens must be of one version.

    Raises ValueError naming both counts where prompts and outputs, or an output's ids, logprobs and versions, are not
    as many; and where versions are mixed.
    """
    if len(prompts) != len(outputs):
        raise ValueError(f"{len(prompts)} prompts and {len(outputs)} outputs")
    for i, out in enumerate(outputs):
        if not len(out.ids) == len(out.logprobs) == len(out.versions):
            raise ValueError(
                f"output {i}: {len(out.ids)} ids, {len(out.logprobs)} logprobs and {len(out.versions)} versions"
            )
        if not len(prompts[i]):
            raise ValueError(f"prompt {i} is empty: its first token has no logprob")
    seen = {v for out in outputs for v in out.versions}
    if version is None and len(seen) > 1:
        raise ValueError(
            f"tokens of {len(seen)} weight versions {sorted(seen)}; name the one that the model has"
        )
    sequences = [[*prompt, *out.ids] for prompt, out in zip(prompts, outputs, strict=True)]
    trained = [
        values[len(prompt) - 1 :].cpu()
        for prompt, values in zip(prompts, logprobs(model, sequences, temperature), strict=True)
    ]
    reported = [out.logprobs.cpu() for out in outputs]
    mine = [
        torch.tensor([version in (None, v) for v in out.versions], dtype=torch.bool)
        for out in outputs
    ]
    return Rollout(bits(reported, trained, mine), gap(reported, trained, mine))
