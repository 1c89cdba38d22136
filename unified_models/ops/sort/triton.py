"""A stable counting sort in one launch: each expert's program finds its own place."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
"""Pairs that a program reads at a time."""


@triton.jit(do_not_specialize=["P"])
def _by_expert(ids_ptr, order_ptr, place_ptr, counts_ptr, P, BLOCK: tl.constexpr):
    """Program e: the pairs of expert e, in their order, behind all those of the experts before."""
    e = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), dtype=tl.int32)
    equal = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, P, BLOCK):
        there = start + at < P
        ids = tl.load(ids_ptr + start + at, mask=there, other=0).to(tl.int32)
        lower += (there & (ids < e)).to(tl.int32)
        equal += (there & (ids == e)).to(tl.int32)
    first = tl.sum(lower, axis=0)  # a count
    tl.store(counts_ptr + e, tl.sum(equal, axis=0).to(tl.int64))  # a count
    for start in range(0, P, BLOCK):
        there = start + at < P
        ids = tl.load(ids_ptr + start + at, mask=there, other=0).to(tl.int32)
        mine = there & (ids == e)
        ones = mine.to(tl.int32)
        place = first + tl.cumsum(ones, axis=0) - 1  # a count
        tl.store(order_ptr + place, (start + at).to(tl.int64), mask=mine)
        tl.store(place_ptr + start + at, place.to(tl.int64), mask=mine)
        first += tl.sum(ones, axis=0)  # a count


def by_expert(ids_TK: Tensor, E: int, block: int = BLOCK) -> tuple[Tensor, Tensor, Tensor]:
    """order_P, place_TK and counts_E, int64. ids_TK: whole numbers in [0, E). block: for tests."""
    ids_TK = ids_TK.contiguous()
    P = ids_TK.numel()
    order_P = torch.empty(P, dtype=torch.int64, device=ids_TK.device)
    place_TK = torch.empty(ids_TK.shape, dtype=torch.int64, device=ids_TK.device)
    counts_E = torch.empty(E, dtype=torch.int64, device=ids_TK.device)
    width = min(max(triton.next_power_of_2(P), 128), block)
    _by_expert[(E,)](ids_TK, order_P, place_TK, counts_E, P, width, num_warps=4)
    return order_P, place_TK, counts_E
