"""log_softmax in the order of vLLM's V2 runner: the exponentials of 1024 values at a time, block sums added in order.

On CPU that runner's kernel runs in Triton's interpreter, whose arithmetic is numpy's; so is this.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from unified_models.autograd import apply

BLOCK = 1024


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TV: Tensor) -> Tensor:
        top_T1 = x_TV.amax(-1, keepdim=True)
        sums = [row_sum(row, top) for row, top in zip(x_TV.numpy(), top_T1.numpy(), strict=True)]
        total_T1 = torch.from_numpy(np.array(sums, np.float32).reshape(-1, 1))
        out = x_TV - top_T1 - torch.from_numpy(np.log(total_T1.numpy()))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        total = grads[0].sum(-1, keepdim=True)  # of a gradient
        return grads[0] - torch.exp(out) * total


def row_sum(row_V: Any, top: Any) -> Any:
    """sum_v e^{x_v - top} of one row, float32: each block's by numpy, onto 0 in order."""
    total = np.float32(0)
    for start in range(0, len(row_V), BLOCK):
        block = np.zeros(BLOCK, np.float32)
        part = row_V[start : start + BLOCK]
        block[: len(part)] = np.exp(part - top)
        total = total + np.sum(block, keepdims=False)  # numpy's order is the kernel's
    return total


def log_softmax(x_TV: Tensor) -> Tensor:
    """float32 [T, V]."""
    return apply(_LogSoftmax, x_TV.contiguous())
