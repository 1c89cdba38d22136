"""Sequences in several steps, as an engine would run them: what the tests of kernels over pages share."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from unified_models.context.step import DeviceStep


class Piece(NamedTuple):
    """One step. order: the sequences, those without tokens behind the others. at: the place of each of its tokens in
    the pack of all sequences. index: the same, int64, and 0 for each token of padding."""

    step: DeviceStep
    order: list[int]
    at: list[int]
    index: Tensor


def pieces(steps: Sequence[Sequence[int]], padded: int, most: int) -> Iterator[Piece]:
    """steps: new tokens of each sequence in each step; padded: tokens of padding behind them; most: `DeviceStep`'s."""
    lengths = [sum(new) for new in zip(*steps, strict=True)]
    starts, done = [sum(lengths[:s]) for s in range(len(lengths))], [0] * len(lengths)
    for new in steps:
        order = sorted(range(len(new)), key=lambda s, new=new: not new[s])
        at = [starts[s] + done[s] + i for s in order for i in range(new[s])]
        counts = torch.tensor([0, *(new[s] for s in order)])
        total = torch.tensor([done[s] + new[s] if new[s] else 0 for s in order])
        step = DeviceStep(counts.cumsum(0).int(), total.int(), len(at) + padded, most)
        yield Piece(step, order, at, torch.tensor([*at, *[0] * padded]))
        done = [n + m for n, m in zip(done, new, strict=True)]
