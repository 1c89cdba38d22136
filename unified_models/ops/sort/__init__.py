"""Pairs of tokens and experts, sorted by expert."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sorted(NamedTuple):
    """order_P: the pairs t * K + k by expert, each expert's in their order; place_TK: where pair (t, k) stands in it;
    counts_E: pairs of each expert. int64."""

    order_P: Tensor
    place_TK: Tensor
    counts_E: Tensor


def by_expert(ids_TK: Tensor, E: int) -> Sorted:
    """The pairs of ids_TK, whole numbers in [0, E), sorted by expert. On CUDA nothing waits for the GPU."""
    if ids_TK.is_cuda:
        from unified_models.ops.sort import triton as kernels

        return Sorted(*kernels.by_expert(ids_TK, E))
    flat_P = ids_TK.flatten()
    order_P = flat_P.argsort(stable=True)
    place_P = torch.empty_like(order_P).scatter_(0, order_P, torch.arange(len(order_P)))
    return Sorted(order_P, place_P.view(ids_TK.shape), torch.bincount(flat_P, minlength=E))
