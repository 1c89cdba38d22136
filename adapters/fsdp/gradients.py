"""The norm of gradients that lie in parts on several processes."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip(parameters: Iterable[Tensor], most: float) -> float:
    """Scale all gradients together so that their norm is at most `most`; the norm before. Collective.

    Under `wrap` each process holds other parts of them: a shard of a cut master, or experts that no other process has.
    Squares are added in float64.
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in grads]
    squares = torch.zeros((), dtype=torch.float64, device=local[0].device if local else "cpu")
    for grad in local:
        squares += grad.double().square().sum()
    dist.all_reduce(squares)
    norm = float(squares.sqrt())
    if norm > most:
        for grad in local:
            grad *= most / norm
    return norm
