"""Paged memory: the slots of all running sequences, and how one step reads and writes them.

Slots that live equally long share a page table: those with the same tokens a page and the same `keep`. Entries lie in
pages that cover at least one window and are kept until the sequence leaves; their open rows slide like any other Rows.

The seam for State: one more kind of store in `_store`, in a group of its own with a page of `chunk` tokens that holds
the rows of that chunk and the state after its last token, and keep = chunk + 1. Then the window rule keeps the page
of the last boundary and that of the open chunk, and a prefix hit ends at a multiple of `chunk` by the rule of
complete pages.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from unified_models.context.memory import Readable
from unified_models.context.slots import Entries, Rows, Slot
from unified_models.context.step import Step
from unified_models.engine.pool import PagePool
from unified_models.engine.table import PageTable

Numbers = NDArray[np.int64]

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

    A single sequence of `cache_tokens` tokens always fits. poison: fill pages with 0xFF when they change hands.

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
        poison: bool = False,
    ) -> None:
        self.page_tokens, self.seats, self.device, self.poison = page_tokens, seats, device, poison
        self.cache_tokens = cache_tokens
        self.tables: dict[tuple[int, int | None], PageTable] = {}
        self.stores: dict[Slot, Store] = {}
        for slot in slots:
            if isinstance(slot, Rows):
                self._store(slot, slot.dim, stride=1, keep=slot.keep)
            elif isinstance(slot, Entries):
                self._store(slot, slot.dim, stride=slot.stride, keep=None)
                self._store(slot.open, slot.open.dim, stride=1, keep=slot.span)
            else:
                raise ValueError(
                    f"{slot.path}: the embedded engine stores Rows and Entries, not {type(slot).__name__}"
                )

    def _store(self, slot: Rows | Entries, dim: int, *, stride: int, keep: int | None) -> None:
        page_tokens = max(self.page_tokens, stride)
        if page_tokens % stride or page_tokens % self.page_tokens:
            raise ValueError(
                f"{slot.path}: page_tokens {self.page_tokens} and the slot's stride {stride} must be multiples of "
                f"one another"
            )
        table = self.tables.get((page_tokens, keep))
        if table is None:
            pool = PagePool(-(-self.cache_tokens // page_tokens))
            table = self.tables[page_tokens, keep] = PageTable(pool, page_tokens, keep, self.seats)
        rows = table.pool.num_pages * (page_tokens // stride)
        data_RB = torch.zeros(rows, slot.record.size(dim), dtype=torch.uint8, device=self.device)
        store = self.stores[slot] = Store(table, stride, data_RB)
        if self.poison:
            data_RB.fill_(POISON)
            table.pool.scrubs.append(store.scrub)

    @property
    def num_bytes(self) -> int:
        return sum(store.data_RB.numel() for store in self.stores.values())

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

    def rows(self, step: Step, slot: Rows, new_TD: Tensor) -> Readable:
        """See `context.memory.Memory`."""
        return self._exchange(step, slot, new_TD)

    def entries(self, step: Step, slot: Entries, new_UD: Tensor) -> Readable:
        """See `context.memory.Memory`."""
        return self._exchange(step, slot, new_UD)

    def _exchange(self, step: Step, slot: Rows | Entries, new_ND: Tensor) -> Readable:
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
        data_RB.index_copy_(0, layout.write_N, slot.record.encode(new_ND))
        return Readable(
            slot.record.decode(data_RB.index_select(0, layout.read_R), slot.dim), layout.base_S
        )

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
        counts_S = end_S - first_S
        base_S = np.cumsum(counts_S) - end_S
        number_N = np.arange(counts_S.sum()) - base_S.repeat(counts_S)
        seat_N = self.seats_S.repeat(counts_S)
        page_N = store.table.pages_SK[seat_N, number_N // store.per_page]
        return page_N * store.per_page + number_N % store.per_page, base_S
