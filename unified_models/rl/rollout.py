"""The side that samples: tokens with their logprobs and weight versions, and weights replaced in between."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from torch import Tensor

from unified_models.context.local import LocalContext
from unified_models.engine import Engine, Output, Sampling
from unified_models.model import LanguageModel
from unified_models.rl.config import RolloutConfig


class Rollout(Protocol):
    """An engine that a run samples from."""

    @property
    def version(self) -> int:
        """Of the weights that it has."""

    @property
    def prefix_hits(self) -> int:
        """Tokens that were not run again, since the start, because a prefix cache had them."""

    def generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> Sequence[Output]:
        """Sample onto each prompt: ids, float32 logprobs and one version a token."""

    def update(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights in place; the version is larger than the one before."""


class EmbeddedRollout:
    """Rollout by `um.Engine`, over a model of its own: weights arrive by `update` only."""

    def __init__(
        self,
        model: LanguageModel,
        config: RolloutConfig,
        context: Callable[..., Any] = LocalContext,
    ) -> None:
        sizes = (config.cache_tokens, config.step_tokens, config.max_sequences)
        self.engine = Engine(model, *sizes, page_tokens=config.page_tokens, context=context)

    @property
    def version(self) -> int:
        """See Rollout."""
        return self.engine.stats.weight_version

    @property
    def prefix_hits(self) -> int:
        """See Rollout."""
        return self.engine.stats.prefix_hits

    def generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> Sequence[Output]:
        """See Rollout."""
        return self.engine.generate(prompts, samplings)

    def update(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See Rollout."""
        self.engine.update_weights(named_tensors, version)
