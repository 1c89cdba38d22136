"""log p = x - log sum exp x, in the precision of its input."""

from torch import Tensor


def logprobs(logits_TV: Tensor, temperature_T: Tensor, ids_T: Tensor) -> Tensor:
    x = logits_TV / temperature_T[:, None]
    x = x - x.amax(-1, keepdim=True)
    return x.gather(-1, ids_T[:, None])[:, 0] - x.exp().sum(-1).log()
