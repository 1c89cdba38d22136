"""Sums within a row, whose bits do not depend on how many rows there are."""

import functools
import operator as plain
from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply


def ordered_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over a short dimension as written adds, first to last."""
    return functools.reduce(plain.add, x.unbind(dim))


def row_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, which is kept with size 1. x: contiguous, or strided sums would differ.

    CPU: torch's. CUDA: the kernel of `sums_triton`, since torch's splits rows by how many there are.
    """
    if x.is_cuda:
        return apply(_RowSum, x)
    return x.contiguous().sum(-1, keepdim=True)


def row_mean(x: Tensor) -> Tensor:
    """`row_sum` over the number of values."""
    return row_sum(x) / x.shape[-1]


def running_sum(x: Tensor) -> Tensor:
    """Sums of the first 1, 2, ... values of the last dimension.

    CPU: torch's. CUDA: the same adds in order, since torch's scan depends on the number of rows there.
    """
    return apply(_RunningSum, x) if x.is_cuda else x.cumsum(-1)


def add_rows_(out: Tensor, index_N: Tensor, rows: Tensor) -> Tensor:
    """out[index[n]] += rows[n], equal indices in row order, in place."""
    if out.is_cuda:  # index_add_ adds there in whatever order threads come
        return out.index_put_((index_N,), rows, accumulate=True)
    return out.index_add_(0, index_N, rows)


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from unified_models.ops.sums_triton import row_sum

        ctx.shape = x.shape
        return row_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].expand(ctx.shape)


class _RunningSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        from unified_models.ops.sums_triton import running_sum

        return running_sum(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].flip(-1).cumsum(-1).flip(-1)
