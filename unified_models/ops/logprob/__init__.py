"""The logprob of a token, as the sampler reports it."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator


@operator
def log_softmax(logits_TV: Tensor, temperature_T: Tensor) -> Tensor:
    """log_softmax(logits / temperature) over one whole vocabulary row; float32 [T, V].

    temperature_T: float32, one a row; a tensor, since a division by a Python number may become a product by its
    reciprocal. Provider "torch_row": torch's own row order, the same for any number of rows.
    """
    return torch.log_softmax(logits_TV / temperature_T[:, None], -1)


def logprobs(logits_TV: Tensor, temperature_T: Tensor, ids_T: Tensor) -> Tensor:
    """The element of `log_softmax` at each row's id; float32 [T]."""
    return log_softmax(logits_TV, temperature_T).gather(-1, ids_T[:, None])[:, 0]
