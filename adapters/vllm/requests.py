"""What a request may ask for, checked as it is taken: a sampler option that changes the distribution is refused."""

from typing import Any, ClassVar

from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.sample.logits_processor import LogitsProcessor

try:  # the V2 runner has an interface of its own; releases before it have not
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2
except ImportError:

    class LogitsProcessorV2:  # type: ignore[no-redef]
        """No second interface in this release."""


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "min_tokens": (0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "logit_bias": (None, {}),
    "bad_words": (None, []),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}
"""Option -> the values that leave log_softmax(logits / temperature) as it is."""


class Checks(LogitsProcessor, LogitsProcessorV2):  # type: ignore[misc]
    """Changes no logit. vLLM, whichever its runner, asks it about each request before it is queued."""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = NEUTRAL

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """ValueError naming the option and its value."""
        for option, values in cls.neutral.items():
            value = getattr(sampling_params, option, values[0])
            if value not in values:
                raise ValueError(
                    f"{option} = {value!r}: it changes the distribution that a trainer computes logprobs of, so its "
                    f"logprobs would not be exact; leave it at {values[0]!r}"
                )
        if sampling_params.seed is not None and current_platform.is_cpu():
            raise ValueError(
                f"seed = {sampling_params.seed}: vLLM on CPU fails on a seeded request whose prompt takes more than "
                "one step (it moves the generator back, which CPU generators cannot); use the engine's seed"
            )

    def __init__(self, *_: Any) -> None:
        """Keeps nothing."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """V2: whether any logit of the request changes."""
        return False

    def apply(self, logits: Tensor, *_: Any) -> Tensor:
        """The logits as they are."""
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: Any) -> None:
        """Nothing depends on the batch."""
