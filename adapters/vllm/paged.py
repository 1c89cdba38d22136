"""The `PagedMemory` of a vLLM step on a GPU: kernels read and write vLLM's pages where they are."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from unified_models.adapters.vllm.caches import ALIGNED, HEADER, Cache
from unified_models.context.slots import Entries, Rows, Slot, State
from unified_models.context.step import Step
from unified_models.formats import LatentFP8, PlainRecord, StaticFP8, VectorFP8
from unified_models.formats.records import TailRecord
from unified_models.ops import pages
from unified_models.ops.pages import Pages


def readable(slots: Iterable[Slot]) -> bool:
    """Whether there are kernels for everything that a model keeps."""
    kinds = PlainRecord | StaticFP8 | LatentFP8 | VectorFP8
    return all(
        isinstance(slot.record, kinds)
        if isinstance(slot, Rows | Entries)
        else isinstance(slot, State)
        for slot in slots
    )


class PageMemory:
    """caches: of every slot that rows are kept for, by slot."""

    def __init__(self, caches: Mapping[Slot, Cache]) -> None:
        self.caches = caches

    def pages(self, slot: Rows | Entries | State) -> tuple[Pages, ...]:
        """See `context.memory.PagedMemory`."""
        cache = self.caches[slot]
        if isinstance(slot, State):
            return state_pages(cache, slot)
        dtype = slot.record.dtype if isinstance(slot.record, PlainRecord) else torch.uint8
        row = slot.record.size(slot.dim)
        if slot in cache.short:
            start, keep = cache.short[slot]
            return (replace(typed(cache, dtype, row, start, cache.tokens), ring=keep),)
        return (typed(cache, dtype, row, cache.start(slot), cache.rows_per_page),)

    def keep(self, step: Step, slot: Rows | State, *rows: Tensor) -> None:
        """See `context.memory.PagedMemory`."""
        from unified_models.ops.records_triton import write_records

        who, to = step.sequences, self.pages(slot)[:3]
        if isinstance(slot, Rows) and isinstance(slot.record, LatentFP8 | VectorFP8):
            at = who.sequence_T, who.position_T, who.total_S
            write_records(to[0], rows[0], slot.record, *at)
            return
        if len(rows) == 2:
            to = (to[0], replace(to[0], start=to[0].start + rows[0].shape[1]))
        pages.write(who, to, rows)

    def keep_entries(
        self, slot: Entries, entries_UD: Tensor, sequence_U: Tensor, number_U: Tensor
    ) -> None:
        """See `context.memory.PagedMemory`."""
        from unified_models.ops.records_triton import write_records

        metadata = self.caches[slot].metadata
        assert metadata is not None, "a step has pages"
        at = sequence_U, number_U, metadata.total_S  # no sequence has as many
        write_records(self.pages(slot)[0], entries_UD, slot.record, *at)


def state_pages(cache: Cache, slot: State) -> tuple[Pages, ...]:
    """Of x, the time steps, b and the states, as they are and as they are seen."""
    record, (x, b, _) = slot.open.record, slot.parts
    most = record.most if isinstance(record, TailRecord) else record
    assert isinstance(most, PlainRecord), f"{slot.path}: {record.name}"
    size, wide = most.dtype.itemsize, cache.row
    states = cache.tokens * wide + HEADER
    seen = states if most.dtype == torch.float32 else states + 4 * slot.size
    return (
        typed(cache, most.dtype, wide, 0, cache.tokens),
        typed(cache, torch.float32, wide, (x + b) * size, cache.tokens),
        typed(cache, most.dtype, wide, x * size, cache.tokens),
        typed(cache, torch.float32, 0, states, 1),
        typed(cache, most.dtype, 0, seen, 1),
    )


def typed(cache: Cache, dtype: torch.dtype, row: int, start: int, per_page: int) -> Pages:
    """Rows that begin `start` bytes into a page and are `row` bytes long, as values of a dtype. AssertionError: they do
    not begin where such a value may."""
    metadata, size = cache.metadata, dtype.itemsize
    assert metadata is not None, "a step has pages"
    page = cache.kv_cache.stride(0) * cache.kv_cache.element_size()
    assert not (row % size or start % size or page % size), (
        f"{cache.slot.path}: not on {size} bytes"
    )
    values = cache.pages_PB[:, :ALIGNED].view(dtype)  # where they begin is all that a kernel asks
    return Pages(values, metadata.pages_SK, per_page, page // size, row // size, start // size)
