"""Who is in a step: a pack of tokens of S sequences, and how many tokens each had before."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from unified_models.ops.pages import Sequences


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

    def once(self, key: Hashable, build: Callable[[], Any]) -> Any:
        """`build()`, kept under its key as long as the step: what layers share."""
        kept: dict[Hashable, Any] = self.__dict__.setdefault("_kept", {})
        if key not in kept:
            kept[key] = build()
        return kept[key]

    @property
    def most(self) -> int:
        """No sequence has more tokens than this after the step."""
        return max((p + n for p, n in zip(self.past, self.lengths, strict=True)), default=0)

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

    def places_T(self, stride: int) -> Tensor:
        """The place of each token in its window of `stride` tokens; int64."""
        found: Tensor = self.once(("places", stride), lambda: self.positions_T % stride)
        return found

    def counts_T(self, stride: int) -> Tensor:
        """Windows of `stride` tokens that closed at or before each token; int64."""
        found: Tensor = self.once(("counts", stride), lambda: (self.positions_T + 1) // stride)
        return found

    @cached_property
    def sequences(self) -> Sequences:
        """As kernels read them."""
        of = (self.sequence_T, self.positions_T, self.starts_S, self.past_S, self.total_S)
        return Sequences(*(each.int() for each in of))


class DeviceStep(Step):
    """A step that the host does not know: starts_S1 and total_S are on the device, int32, and may be others whenever
    the work is replayed. num_tokens and the sequences count padding, which stands behind the rest.

    most: no sequence has more tokens than this after any step.
    """

    def __init__(self, starts_S1: Tensor, total_S: Tensor, num_tokens: int, most: int) -> None:
        device = total_S.device
        super().__init__(lengths=(), past=(), device=device)
        given = {"starts_S1": starts_S1, "given_S": total_S, "tokens": num_tokens, "bound": most}
        self.__dict__.update(given)

    starts_S1: Tensor
    given_S: Tensor
    tokens: int
    bound: int

    @property
    def num_tokens(self) -> int:
        return self.tokens

    @property
    def most(self) -> int:
        return self.bound

    @cached_property
    def sequences(self) -> Sequences:
        from unified_models.ops.pages_triton import owners

        past_S = self.given_S - self.starts_S1.diff()
        sequence_T, position_T = owners(self.starts_S1, past_S, self.tokens)
        return Sequences(sequence_T, position_T, self.starts_S1, past_S, self.given_S)

    @cached_property
    def positions_T(self) -> Tensor:
        return self.sequences.position_T.long()


def starts(counts_S: Tensor) -> Tensor:
    """Exclusive running sum with the total at the end: [S] to [S + 1]."""
    return torch.cat((counts_S.new_zeros(1), counts_S.cumsum(0)))


def owners(counts_S: Tensor) -> Tensor:
    """s repeated counts[s] times."""
    return torch.arange(len(counts_S), device=counts_S.device).repeat_interleave(counts_S)
