"""Where slots are kept, seen from one step: the protocol, and the memory of a pack without past."""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from unified_models.context.slots import Entries, Rows, State
from unified_models.context.step import Step, starts
from unified_models.formats import round_trip
from unified_models.ops.pages import Pages


@dataclass(frozen=True)
class Readable:
    """The rows of a slot that can be read in this step, as they come back from their record.

    rows_RD: all sequences, one after the other, each in ascending order. base_S: row p of sequence s (a token's
    position, or an entry's number) is rows_RD[base_S[s] + p]; a base may be negative where early rows are gone.
    """

    rows_RD: Tensor
    base_S: Tensor


class Memory(Protocol):
    """What sequences remember, seen from one step. Rows written are read back through their record, always."""

    def rows(
        self, step: Step, slot: Rows, new_TD: Tensor, scales_D: Tensor | None = None
    ) -> Readable:
        """Keep one new row a token of the step; read back those and the earlier ones that a window of
        `slot.keep` tokens can reach from any token of the step. scales_D: of the slot's record."""

    def entries(self, step: Step, slot: Entries, new_UD: Tensor) -> Readable:
        """Keep the entries that close in this step, sequence by sequence in ascending order (`closed(step, slot)` of
        each); read back all entries of each sequence."""

    def states(self, step: Step, slot: State) -> Tensor:
        """The state of each sequence at its last chunk boundary before this step, float32 [S, H, P, N]; zeros where
        no chunk is full yet."""

    def keep_states(self, step: Step, slot: State, new_UHPN: Tensor) -> None:
        """Keep the states after the chunks that fill up in this step, sequence by sequence in ascending order
        (`closed(step, slot)` of each)."""


@runtime_checkable
class PagedMemory(Protocol):
    """What sequences remember, for kernels that read rows where they lie. Nothing is gathered, and the host need not
    know the step."""

    def pages(self, slot: Rows | Entries | State) -> tuple[Pages, ...]:
        """Where rows are: of Rows and Entries one, a row's record as it is; of a State those of its open x, time steps
        and b, and of its states, whose row c is the state after chunk c, in float32 and as rows see it."""

    def keep(self, step: Step, slot: Rows | State, *rows: Tensor) -> None:
        """Keep a row [T, ...] for each token of the step, as the slot's record holds it, its parts side by side; of a
        State x, dt and b."""

    def keep_entries(
        self, slot: Entries, entries_UD: Tensor, sequence_U: Tensor, number_U: Tensor
    ) -> None:
        """Keep entry number_U[u] of sequence sequence_U[u], int32; sequence -1: none."""


def closed(step: Step, slot: Entries | State) -> tuple[Tensor, Tensor]:
    """first_S, counts_S: the number of the first window or chunk that closes in this step, and how many do, int64."""
    stride = slot.stride if isinstance(slot, Entries) else slot.chunk
    first_S = step.past_S // stride
    return first_S, step.total_S // stride - first_S


class PackMemory:
    """No past: a step's rows are all there is. The gradient passes the record's round trip straight through."""

    def rows(
        self, step: Step, slot: Rows, new_TD: Tensor, scales_D: Tensor | None = None
    ) -> Readable:
        assert not any(step.past), "a pack without memory starts every sequence at position 0"
        return Readable(round_trip(new_TD, slot.record, scales_D), step.starts_S[:-1])

    def entries(self, step: Step, slot: Entries, new_UD: Tensor) -> Readable:
        _, counts_S = closed(step, slot)
        return Readable(round_trip(new_UD, slot.record), starts(counts_S)[:-1])

    def states(self, step: Step, slot: State) -> Tensor:
        zero = torch.zeros((), dtype=torch.float32, device=step.device)
        return zero.expand(len(step.lengths), *slot.shape)

    def keep_states(self, step: Step, slot: State, new_UHPN: Tensor) -> None:
        """A pack has no next step."""
