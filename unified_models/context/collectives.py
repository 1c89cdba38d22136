"""Rows that move between processes, with their gradients. In a forward nothing is summed."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unified_models.autograd import apply

# Its older name is told to be on its way out.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
Group = Any
"""A torch.distributed process group, which torch leaves untyped."""


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group
    ) -> Tensor:
        ctx.args = receive, send, group
        return _all_to_all(x, send, receive, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(grads[0], *ctx.args), None, None, None


def exchange(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    """Rows to every process of the group, `send[r]` of them to process r in their order; what comes from process 0,
    then 1, ..., `receive[r]` rows each. Processes without rows take part."""
    return apply(_Exchange, x, send, receive, group)


def _all_to_all(x: Tensor, send: Sequence[int], receive: Sequence[int], group: Group) -> Tensor:
    out = x.new_empty(sum(receive), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), list(receive), list(send), group=group)
    return out


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        ctx.counts, ctx.group, ctx.dtype = counts, group, x.dtype
        return _all_gather(x, counts, group).float()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        counts, group = ctx.counts, ctx.group
        mine = counts[dist.get_rank(group)]
        parts = _all_to_all(grads[0], counts, [mine] * len(counts), group)
        total, *others = parts.split(mine) if mine else [parts]
        for other in others:  # in the order of processes
            total = total + other
        return total.to(ctx.dtype), None, None


def gather(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """The rows of all processes in float32, those of process 0 first; process r has `counts[r]`. Gradients of a row are
    added over processes in their order, float32, and rounded once to its dtype, as they are in one process."""
    return apply(_Gather, x, counts, group)


class _Everyones(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
        start = sum(counts[: dist.get_rank(group)])
        ctx.mine = slice(start, start + len(x))
        return _all_gather(x, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.mine], None, None


def everyones(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """`gather` for results of which each process computes the same loss: its own rows get its own gradient, so that
    adding gradients over processes counts nothing twice."""
    return apply(_Everyones, x, counts, group)


def _all_gather(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    assert len(x) == counts[dist.get_rank(group)], f"{len(x)} rows, counted {counts}"
    most = max(counts)
    padded = x.new_zeros(most, *x.shape[1:])
    padded[: len(x)] = x
    out = x.new_empty(len(counts) * most, *x.shape[1:])
    all_gather_single(out, padded, group=group)
    kept = [out[r * most : r * most + count] for r, count in enumerate(counts)]
    return torch.cat(kept)


class _FromPrevious(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, like: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.other = group, dist.get_rank(group) - 1
        out = torch.empty_like(like)
        dist.recv(out, group=group, group_src=ctx.other)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        dist.send(grads[0].contiguous(), group=ctx.group, group_dst=ctx.other)
        return torch.zeros_like(grads[0]), None


def from_previous(like: Tensor, group: Group) -> Tensor:
    """What the process before this one hands over (`to_next`): of the shape and dtype of `like`, which needs to have a
    gradient for that of the result to go back."""
    return apply(_FromPrevious, like, group)


class _ToNext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, x: Tensor, group: Group) -> Tensor:
        ctx.group, ctx.other, ctx.like = group, dist.get_rank(group) + 1, x.detach()[..., :0]
        ctx.shape = x.shape
        dist.send(x.detach().contiguous(), group=group, group_dst=ctx.other)
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        dx = ctx.like.new_empty(ctx.shape)
        dist.recv(dx, group=ctx.group, group_src=ctx.other)
        return grads[0], dx, None


def to_next(y: Tensor, x: Tensor, group: Group) -> Tensor:
    """Hand x to the next process; y itself, through which the gradient of x comes back."""
    return apply(_ToNext, y, x, group)
