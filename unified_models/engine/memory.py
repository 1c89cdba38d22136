"""Paged memory: the slots of all running sequences, and how one step reads and writes them.

Slots that live equally long share a page table: those with the same tokens a page and the same `keep`. Entries lie in
pages that cover at least one window and are kept until the sequence leaves; their open rows slide like any other Rows.

A State's open rows and its state lie in pages of one chunk, in a group of their own that slides by chunk + 1 tokens:
a sequence holds the page of its last boundary, whose state it reads, and the one it fills. A prefix hit ends at a
complete page, so at a multiple of the chunk. There are pages for `state_slots` sequences, and no more than that run.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from unified_models.context.memory import Readable
from unified_models.context.slots import Entries, Rows, Slot, State
from unified_models.context.step import Step
from unified_models.engine.pool import PagePool
from unified_models.engine.states import StateStore
from unified_models.engine.table import Numbers, PageTable, numbered

POISON = 0xFF  # NaN in float32, bfloat16, e4m3 and e8m0


@dataclass(frozen=True)
class Store:
    """The pages of one slot: page p holds rows p * per_page .. (p + 1) * per_page of `data_RB`, uint8 records.

    stride: tokens a row stands for.
    """

    table: PageTable
    stride: int
    data_RB: Tensor

    @property
    def per_page(self) -> int:
        return self.table.page_tokens // self.stride

    def scrub(self, page: int) -> None:
        self.data_RB[page * self.per_page : (page + 1) * self.per_page] = POISON


class PagedMemory:
    """Storage for the slots of a model: `seats` sequences, `cache_tokens` tokens in all.

    A single sequence of `cache_tokens` tokens always fits. state_slots: sequences whose scan states fit, whatever a
    step of `step_tokens` tokens brings; pages that they do not use keep the states of prefixes. poison: fill pages
    with NaN when they change hands.

    Raises:
        ValueError: a slot of a kind that is not stored here, or a stride that page_tokens does not fit.
    """

    def __init__(
        self,
        slots: Iterable[Slot],
        *,
        cache_tokens: int,
        page_tokens: int,
        seats: int,
        device: torch.device,
        step_tokens: int,
        state_slots: int,
        poison: bool = False,
    ) -> None:
        self.page_tokens, self.seats, self.device, self.poison = page_tokens, seats, device, poison
        self.cache_tokens, self._step_tokens, self._state_slots = (
            cache_tokens,
            step_tokens,
            state_slots,
        )
        self.tables: dict[tuple[int, int | None, type[Slot]], PageTable] = {}
        self.stores: dict[Slot, Store] = {}
        self.states: dict[State, StateStore] = {}
        for slot in slots:
            if isinstance(slot, Rows):
                self._store(slot, slot.dim, stride=1, keep=slot.keep)
            elif isinstance(slot, Entries):
                self._store(slot, slot.dim, stride=slot.stride, keep=None)
                self._store(slot.open, slot.open.dim, stride=1, keep=slot.span)
            elif isinstance(slot, State):
                self._store_state(slot)
            else:
                raise ValueError(
                    f"{slot.path}: the embedded engine stores Rows, Entries and States, not {type(slot).__name__}"
                )

    def _store_state(self, slot: State) -> None:
        if slot.chunk % self.page_tokens:
            raise ValueError(
                f"{slot.path}: a prefix may end after any {self.page_tokens} tokens (page_tokens), but the scan's "
                f"chunk of {slot.chunk} is no multiple of that"
            )
        pages = state_pages(slot.chunk, self._state_slots, self._step_tokens, self.cache_tokens)
        table = self._table(slot.chunk, slot.chunk + 1, State, pages)
        self._add(slot.open, slot.open.dim, table, stride=1)
        store = self.states[slot] = StateStore(slot, table, self.device)
        table.pool.scrubs.append(store.scrub)

    @property
    def state_slots(self) -> int | None:
        """Sequences that may run at a time for the states they keep; None: the model keeps none."""
        return self._state_slots if self.states else None

    def _table(self, page_tokens: int, keep: int | None, kind: type[Slot], pages: int) -> PageTable:
        """The group of slots that live equally long."""
        table = self.tables.get((page_tokens, keep, kind))
        if table is None:
            table = PageTable(PagePool(pages), page_tokens, keep, self.seats, self.cache_tokens)
            self.tables[page_tokens, keep, kind] = table
        return table

    def _store(self, slot: Rows | Entries, dim: int, *, stride: int, keep: int | None) -> None:
        page_tokens = max(self.page_tokens, stride)
        if page_tokens % stride or page_tokens % self.page_tokens:
            raise ValueError(
                f"{slot.path}: page_tokens {self.page_tokens} and the slot's stride {stride} must be multiples of "
                f"one another"
            )
        pages = -(-self.cache_tokens // page_tokens)
        self._add(slot, dim, self._table(page_tokens, keep, Rows, pages), stride=stride)

    def _add(self, slot: Rows | Entries, dim: int, table: PageTable, *, stride: int) -> None:
        page_tokens = table.page_tokens
        rows = table.pool.num_pages * (page_tokens // stride)
        data_RB = torch.zeros(rows, slot.record.size(dim), dtype=torch.uint8, device=self.device)
        store = self.stores[slot] = Store(table, stride, data_RB)
        if self.poison:
            data_RB.fill_(POISON)
            table.pool.scrubs.append(store.scrub)

    @property
    def num_bytes(self) -> int:
        states = sum(store.num_bytes for store in self.states.values())
        return states + sum(store.data_RB.numel() for store in self.stores.values())

    @property
    def used_pages(self) -> int:
        """Pages with a user, over all groups."""
        return sum(table.pool.used for table in self.tables.values())

    def grow(self, seat: int, tokens: int) -> bool:
        """Take the pages for that many tokens of a seat, in every group or (False) in none."""
        tables = self.tables.values()
        if any(table.missing(seat, tokens) > table.pool.available for table in tables):
            return False
        for table in tables:
            table.grow(seat, tokens)
        return True

    def room(self, seat: int, tokens: int, step_tokens: int) -> bool:
        """Whether a seat can be run up to that many tokens with the pages that are available now."""
        return all(
            table.lacking(seat, tokens, step_tokens) <= table.pool.available
            for table in self.tables.values()
        )

    def settle(self, seat: int, tokens: int, digests: list[bytes] | None) -> None:
        """A step is over: offer complete pages for reuse (by their digests, if there are any) and release what the
        window has left behind."""
        for table in self.tables.values():
            if digests is not None:
                table.name(seat, tokens, digests, self.page_tokens)
            table.trim(seat, tokens)

    def adopt(self, seat: int, tokens: int, digests: list[bytes]) -> None:
        """Start a seat with the pages of a prefix that `prefix.longest` found."""
        for table in self.tables.values():
            table.adopt(seat, tokens, digests, self.page_tokens)

    def release(self, seat: int) -> None:
        """The sequence leaves its seat."""
        for table in self.tables.values():
            table.clear(seat)

    def forget(self) -> None:
        """Nothing that is stored may be found by its prefix any more."""
        for table in self.tables.values():
            table.pool.forget()

    def at(self, step: Step, seats: list[int]) -> "StepMemory":
        """What a context sees: sequence s of the step sits on seats[s], its pages are taken."""
        return StepMemory(self, step, np.array(seats, np.int64))


def state_pages(chunk: int, sequences: int, step_tokens: int, cache_tokens: int) -> int:
    """Pages with which that many sequences are never short of one, nor refused at admission.

    A sequence holds its last boundary and its open chunk, and two tokens more can open one more; beyond that only whole
    chunks of the step count, wherever they go, and those that an admission foresees for one sequence.
    """
    whole = -(-cache_tokens // chunk)
    return min(sequences * whole, 3 * sequences + 2 * (step_tokens // chunk))


@dataclass(frozen=True)
class Layout:
    """Rows of a store in one step: where new ones go, which are read, and where row 0 of a sequence would be."""

    write_N: Tensor
    read_R: Tensor
    base_S: Tensor


@dataclass
class StepMemory:
    """The `Memory` of one step. Layers of one group and stride share their index tensors."""

    paged: PagedMemory
    step: Step
    seats_S: Numbers
    _layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)

    def rows(
        self, step: Step, slot: Rows, new_TD: Tensor, scales_D: Tensor | None = None
    ) -> Readable:
        """See `context.memory.Memory`."""
        return self._exchange(step, slot, new_TD, scales_D)

    def entries(self, step: Step, slot: Entries, new_UD: Tensor) -> Readable:
        """See `context.memory.Memory`."""
        return self._exchange(step, slot, new_UD)

    def states(self, step: Step, slot: State) -> Tensor:
        """See `context.memory.Memory`."""
        return self.paged.states[slot].read(step, self.seats_S)

    def keep_states(self, step: Step, slot: State, new_UHPN: Tensor) -> None:
        """See `context.memory.Memory`."""
        self.paged.states[slot].write(step, self.seats_S, new_UHPN)

    def _exchange(
        self, step: Step, slot: Rows | Entries, new_ND: Tensor, scales_D: Tensor | None = None
    ) -> Readable:
        assert step is self.step, "a memory belongs to one step"
        store = self.paged.stores[slot]
        key = (id(store.table), store.stride)
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = self._lay_out(store)
        assert new_ND.shape == (len(layout.write_N), slot.dim), (
            f"{slot.path}: {tuple(new_ND.shape)} for {len(layout.write_N)} rows of {slot.dim}"
        )
        data_RB = store.data_RB
        data_RB.index_copy_(0, layout.write_N, slot.record.encode(new_ND, scales_D))
        read_RB = data_RB.index_select(0, layout.read_R)
        return Readable(slot.record.decode(read_RB, slot.dim, scales_D), layout.base_S)

    def _lay_out(self, store: Store) -> Layout:
        past_S = np.array(self.step.past, np.int64)
        total_S = past_S + np.array(self.step.lengths, np.int64)
        keep = store.table.keep
        oldest_S = np.zeros_like(past_S) if keep is None else np.maximum(past_S - keep + 1, 0)
        new_S, end_S = past_S // store.stride, total_S // store.stride
        read_R, base_S = self._places(store, oldest_S, end_S)
        write_N, _ = self._places(store, new_S, end_S)
        device = self.paged.device
        return Layout(*(torch.from_numpy(a).to(device) for a in (write_N, read_R, base_S)))

    def _places(self, store: Store, first_S: Numbers, end_S: Numbers) -> tuple[Numbers, Numbers]:
        """Rows of `store.data_RB` for rows first .. end of each sequence, and each sequence's base among them."""
        seat_N, number_N, base_S = numbered(self.seats_S, first_S, end_S)
        page_N = store.table.pages_SK[seat_N, number_N // store.per_page]
        return page_N * store.per_page + number_N % store.per_page, base_S
