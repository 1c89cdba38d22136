"""The logprob of a token, as the sampler reports it."""

from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.activation import by_kernel
from unified_models.ops.logprob import vllm_v2
from unified_models.ops.operator import operator

PROVIDERS = ("torch_row", "vllm_v2")
"""Arithmetics of samplers. torch_row: vLLM's V1 runner and the embedded engine. vllm_v2: vLLM's V2 runner."""


@operator
def log_softmax(
    logits_TV: Tensor, temperature_T: Tensor | None, *, provider: str = "torch_row"
) -> Tensor:
    """log_softmax(logits / temperature) over one whole vocabulary row; float32 [T, V].

    temperature_T: float32, one a row; a tensor, since a division by a Python number may become a product by its
    reciprocal. None: all are 1; nothing is divided, and the bits are the same. provider: of PROVIDERS; the sums of a
    row depend on no other row in either. ValueError for another.
    """
    check_provider(provider)
    scaled_TV = logits_TV if temperature_T is None else logits_TV / temperature_T[:, None]
    if provider == "vllm_v2":
        if scaled_TV.device.type != "cpu":
            raise ValueError(
                f"logprob provider 'vllm_v2' is there for CPU alone, the logits are on {scaled_TV.device}"
            )
        return vllm_v2.log_softmax(scaled_TV)
    return torch.log_softmax(scaled_TV, -1)


class _Logprobs(torch.autograd.Function):
    """torch's forward; the backward by a kernel, from the logits and the answer."""

    @staticmethod
    def forward(
        ctx: Any,
        logits_TV: Tensor,
        temperature_T: Tensor | None,
        ids_T: Tensor,
        provider: str,
        known_T: Tensor | None,
    ) -> Tensor:
        if known_T is None:
            lps_T = elements(logits_TV, temperature_T, ids_T, provider)
        else:
            lps_T = known_T.clone()
        ctx.save_for_backward(logits_TV, temperature_T, ids_T, lps_T)
        return lps_T

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        from unified_models.ops.logprob.backward_triton import logprobs_backward

        return logprobs_backward(grads[0], *ctx.saved_tensors), None, None, None, None


def logprobs(
    logits_TV: Tensor,
    temperature_T: Tensor | None,
    ids_T: Tensor,
    *,
    provider: str = "torch_row",
    known_T: Tensor | None = None,
) -> Tensor:
    """The element of `log_softmax` at each row's id; float32 [T].

    known_T: what the same arguments gave before, where they are asked for again because of the gradient alone: where a
    kernel computes that, nothing else is computed.
    """
    if by_kernel(logits_TV):
        return apply(_Logprobs, logits_TV, temperature_T, ids_T, provider, known_T)
    return elements(logits_TV, temperature_T, ids_T, provider)


def elements(
    logits_TV: Tensor, temperature_T: Tensor | None, ids_T: Tensor, provider: str
) -> Tensor:
    """`logprobs`, by torch's operators."""
    rows = log_softmax(logits_TV, temperature_T, provider=provider)
    return rows.gather(-1, ids_T[:, None])[:, 0]


def check_provider(provider: str) -> None:
    """Refuse an arithmetic that is not known."""
    if provider not in PROVIDERS:
        raise ValueError(f"logprob provider {provider!r}; known: {', '.join(PROVIDERS)}")
