"""How one request is sampled, and what is refused while logprobs are exact."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

LEAST_TEMPERATURE = 1e-6  # logits / T stays finite in float32 far beyond any logit


@dataclass(frozen=True)
class Sampling:
    """max_tokens tokens, fewer if one of `stop_ids` is sampled (it is the last one then).

    temperature: 0 is greedy, reported at T = 1. seed: the draw of output token i depends on (seed, i) and its logits
    row only. The remaining fields change the distribution after the logprob is defined; any value but the neutral one
    is refused.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        if type(self.max_tokens) is not int or self.max_tokens < 1:
            raise ValueError(f"max_tokens must be an int of at least 1, got {self.max_tokens!r}")
        if type(self.seed) is not int:
            raise ValueError(f"seed must be an int, got {self.seed!r}")
        if self.temperature != 0:
            check_temperature("temperature must be 0 (greedy) or", self.temperature)
        if any(type(i) is not int for i in self.stop_ids):
            raise ValueError(f"stop_ids must be ints, got {self.stop_ids!r}")
        object.__setattr__(self, "stop_ids", tuple(self.stop_ids))
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name)
            if value is not None and value not in neutral:
                raise ValueError(
                    f"{name} = {value!r} is refused: it would sample from another distribution than the one whose "
                    f"logprobs are reported and trained (leave it out, or give {neutral[0]!r})"
                )

    @property
    def reported_temperature(self) -> float:
        """The T of log_softmax(logits / T) in the logprobs."""
        return float(self.temperature) or 1.0


NEUTRAL: dict[str, tuple[object, ...]] = {
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "logit_bias": ({},),
}


def check_temperature(must: str, temperature: float) -> None:
    """Refuse what does not give a finite float32 logits / T."""
    number = isinstance(temperature, int | float)
    if not (number and math.isfinite(temperature) and temperature >= LEAST_TEMPERATURE):
        raise ValueError(
            f"{must} a finite number of at least {LEAST_TEMPERATURE}, got {temperature!r}"
        )
