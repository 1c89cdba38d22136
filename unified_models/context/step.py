"""Who is in a step: a pack of tokens of S sequences, and how many tokens each had before."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Step:
    """Sequence s brings `lengths[s]` tokens after `past[s]` earlier ones. Training is past = 0.

    Lengths and pasts are host numbers: they size buffers and bound loops, and choose no arithmetic.
    """

    lengths: tuple[int, ...]
    past: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        past: Sequence[int] | None = None,
        device: torch.device | str = "cpu",
    ) -> "Step":
        """A step of these lengths; past defaults to zeros."""
        past = [0] * len(lengths) if past is None else past
        assert len(past) == len(lengths) and min([*lengths, *past, 0]) >= 0, (
            f"lengths {lengths}, past {past}"
        )
        return cls(tuple(lengths), tuple(past), torch.device(device))

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def lengths_S(self) -> Tensor:
        """int64"""
        return torch.tensor(self.lengths, dtype=torch.int64, device=self.device)

    @cached_property
    def past_S(self) -> Tensor:
        """int64"""
        return torch.tensor(self.past, dtype=torch.int64, device=self.device)

    @cached_property
    def total_S(self) -> Tensor:
        """Tokens of each sequence after this step; int64."""
        return self.past_S + self.lengths_S

    @cached_property
    def starts_S(self) -> Tensor:
        """int64, S + 1; sequence s owns rows starts[s] .. starts[s + 1]."""
        return starts(self.lengths_S)

    @cached_property
    def sequence_T(self) -> Tensor:
        """The sequence of each token; int64."""
        return owners(self.lengths_S)

    @cached_property
    def positions_T(self) -> Tensor:
        """The place of each token in its own sequence; int64."""
        rows = torch.arange(self.num_tokens, device=self.device)
        return rows - (self.starts_S[:-1] - self.past_S)[self.sequence_T]


def starts(counts_S: Tensor) -> Tensor:
    """Exclusive running sum with the total at the end: [S] to [S + 1]."""
    return torch.cat((counts_S.new_zeros(1), counts_S.cumsum(0)))


def owners(counts_S: Tensor) -> Tensor:
    """s repeated counts[s] times."""
    return torch.arange(len(counts_S), device=counts_S.device).repeat_interleave(counts_S)
