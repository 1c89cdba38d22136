"""The logprob of a token, as the sampler reports it."""

import torch
from torch import Tensor

from unified_models.ops.logprob import vllm_v2
from unified_models.ops.operator import operator

PROVIDERS = ("torch_row", "vllm_v2")
"""Arithmetics of samplers. torch_row: vLLM's V1 runner and the embedded engine. vllm_v2: vLLM's V2 runner."""


@operator
def log_softmax(logits_TV: Tensor, temperature_T: Tensor, *, provider: str = "torch_row") -> Tensor:
    """log_softmax(logits / temperature) over one whole vocabulary row; float32 [T, V].

    temperature_T: float32, one a row; a tensor, since a division by a Python number may become a product by its
    reciprocal. provider: of PROVIDERS; the sums of a row depend on no other row in either. ValueError for another.
    """
    check_provider(provider)
    scaled_TV = logits_TV / temperature_T[:, None]
    if provider == "vllm_v2":
        if scaled_TV.device.type != "cpu":
            raise ValueError(
                f"logprob provider 'vllm_v2' is there for CPU alone, the logits are on {scaled_TV.device}"
            )
        return vllm_v2.log_softmax(scaled_TV)
    return torch.log_softmax(scaled_TV, -1)


def logprobs(
    logits_TV: Tensor, temperature_T: Tensor, ids_T: Tensor, *, provider: str = "torch_row"
) -> Tensor:
    """The element of `log_softmax` at each row's id; float32 [T]."""
    rows = log_softmax(logits_TV, temperature_T, provider=provider)
    return rows.gather(-1, ids_T[:, None])[:, 0]


def check_provider(provider: str) -> None:
    """Refuse an arithmetic that is not known."""
    if provider not in PROVIDERS:
        raise ValueError(f"logprob provider {provider!r}; known: {', '.join(PROVIDERS)}")
