"""A 64-bit digest of each row of a tensor, from its bit patterns, by whole-number arithmetic."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from unified_models.verify.compare import patterns

GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
MIX_2 = 0x94D049BB133111EB - (1 << 64)


@functools.lru_cache(maxsize=64)
def odd_numbers(count: int) -> Tensor:
    """int64 [count]: odd, and as good as random (splitmix64 of 1, 2, ..)."""
    z = torch.arange(1, count + 1) * GOLDEN
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return z | 1


def digest(rows: Sequence[Tensor]) -> Tensor:
    """int64 [N]: one number for row n of all tensors [N, ...] together.

    A sum of patterns times odd numbers modulo 2^64: exact, so its order is free, and a single element that differs
    always shows.
    """
    total = torch.zeros(len(rows[0]), dtype=torch.int64)
    column = 0
    for tensor in rows:
        lanes = patterns(tensor).cpu()
        lanes = lanes.flatten(1) if lanes.dim() > 1 else lanes[:, None]
        end = column + lanes.shape[1]
        total += (lanes.long() * odd_numbers(end)[column:]).sum(-1)
        column = end
    return total
