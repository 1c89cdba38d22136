"""The `Memory` of one vLLM step: our slots, read from and written to vLLM's pages."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from unified_models.adapters.vllm.backend import Metadata
from unified_models.adapters.vllm.caches import HEADER, Cache
from unified_models.context.lists import numbers
from unified_models.context.memory import Readable
from unified_models.context.slots import Entries, Rows, Slot, State
from unified_models.context.step import Step, owners


@dataclass(frozen=True)
class Places:
    """Where rows lie: page and row of each, and the base of each sequence among them."""

    page_N: Tensor
    row_N: Tensor
    base_S: Tensor


@dataclass
class VllmMemory:
    """caches: of every slot that rows are kept for, by slot. Layers of one group share their index tensors.

    members: of the requests that vLLM scheduled, those of this step; None: all.
    """

    step: Step
    caches: Mapping[Slot, Cache]
    members: Sequence[int] | None = None
    _known: dict[tuple[int, int, int | None], tuple[Places, Places]] = field(default_factory=dict)

    def rows(
        self, step: Step, slot: Rows, new_TD: Tensor, scales_D: Tensor | None = None
    ) -> Readable:
        """See `context.memory.Memory`."""
        cache = self.caches[slot]
        if slot in cache.short:
            return self._exchange_short(cache, slot, new_TD)
        return self._exchange(cache, slot, new_TD, scales_D)

    def entries(self, step: Step, slot: Entries, new_UD: Tensor) -> Readable:
        """See `context.memory.Memory`."""
        return self._exchange(self.caches[slot], slot, new_UD, None)

    def states(self, step: Step, slot: State) -> Tensor:
        """See `context.memory.Memory`. RuntimeError: a page does not hold what its sequence needs."""
        cache, chunk_S = self.caches[slot], step.past_S // slot.chunk
        open_S = (step.past_S % slot.chunk).nonzero().flatten()
        old_S = chunk_S.nonzero().flatten()
        pages = self._pages(cache, old_S, chunk_S[old_S] - 1)
        self._check(cache, pages, (chunk_S[old_S] - 1) * slot.chunk, slot.chunk)
        opened = self._pages(cache, open_S, chunk_S[open_S])
        self._check(cache, opened, chunk_S[open_S] * slot.chunk, step.past_S[open_S] % slot.chunk)
        out = torch.zeros(len(chunk_S), slot.size, device=step.device)
        first = cache.rows_per_page * cache.row + HEADER
        data = cache.pages_PB[pages, first : first + 4 * slot.size]
        out[old_S] = data.contiguous().view(torch.float32)
        states: Tensor = out.unflatten(1, slot.shape)
        return states

    def keep_states(self, step: Step, slot: State, new_UHPN: Tensor) -> None:
        """See `context.memory.Memory`."""
        cache, first_S, end_S = (
            self.caches[slot],
            step.past_S // slot.chunk,
            step.total_S // slot.chunk,
        )
        whose, chunk = owners(end_S - first_S), numbers(first_S, end_S - first_S)
        pages = self._pages(cache, whose, chunk)
        first = cache.rows_per_page * cache.row + HEADER
        data = new_UHPN.flatten(1).contiguous().view(torch.uint8)
        cache.pages_PB[pages, first : first + 4 * slot.size] = data
        counts = -(-step.total_S // slot.chunk) - first_S
        whose, chunk = owners(counts), numbers(first_S, counts)
        held = (step.total_S[whose] - chunk * slot.chunk).clamp_max(slot.chunk)
        header = torch.stack((chunk * slot.chunk, held), 1).view(torch.uint8)
        cache.pages_PB[self._pages(cache, whose, chunk), first - HEADER : first] = header

    def _pages(self, cache: Cache, sequence_N: Tensor, number_N: Tensor) -> Tensor:
        metadata = cache.metadata
        assert metadata is not None, "a step with a past has pages"
        if self.members is not None:
            sequence_N = torch.tensor(self.members, device=sequence_N.device)[sequence_N]
        return metadata.pages_SK[sequence_N, number_N].long()

    def _check(self, cache: Cache, pages: Tensor, first: Tensor, held: Tensor | int) -> None:
        """What a page says of itself: the position of its first row, and how many it has."""
        start = cache.rows_per_page * cache.row
        said = cache.pages_PB[pages, start : start + HEADER].contiguous().view(torch.int64)
        wrong = (said[:, 0] != first) | (said[:, 1] != held)
        if wrong.any():
            i = int(wrong.nonzero()[0])
            raise RuntimeError(
                f"{cache.slot.path}: page {int(pages[i])} holds {said[i, 1].item()} rows from position "
                f"{said[i, 0].item()}, not those from position {int(first[i])}"
            )

    def _exchange(
        self, cache: Cache, slot: Rows | Entries, new_ND: Tensor, scales_D: Tensor | None
    ) -> Readable:
        new, readable = self._places(cache, slot.keep if isinstance(slot, Rows) else None)
        data = slot.record.encode(new_ND, scales_D)
        start, row = cache.start(slot), slot.record.size(slot.dim)
        rows = cache.pages_PB[:, start : start + cache.rows_per_page * row].unflatten(1, (-1, row))
        rows[new.page_N, new.row_N] = data
        read = rows[readable.page_N, readable.row_N]
        return Readable(slot.record.decode(read, slot.dim, scales_D), readable.base_S)

    def _exchange_short(self, cache: Cache, slot: Rows, new_TD: Tensor) -> Readable:
        """Of Rows in a State's page, which keeps those of its last tokens: place p % keep is of position p of it."""
        step, (start, keep) = self.step, cache.short[slot]
        data, size = slot.record.encode(new_TD), slot.record.size(slot.dim)
        rows = cache.pages_PB[:, start : start + keep * size].unflatten(1, (keep, size))
        old_S = step.past_S.clamp_max(keep - 1)
        position_N, whose_N = numbers(step.past_S - old_S, old_S), owners(old_S)
        old = rows[
            self._pages(cache, whose_N, position_N // cache.tokens),
            position_N % cache.tokens % keep,
        ]
        end_T = torch.minimum(
            step.total_S[step.sequence_T], (step.positions_T // cache.tokens + 1) * cache.tokens
        )
        kept = (step.positions_T >= end_T - keep).nonzero().flatten()
        position_N, whose_N = step.positions_T[kept], step.sequence_T[kept]
        pages = self._pages(cache, whose_N, position_N // cache.tokens)
        rows[pages, position_N % cache.tokens % keep] = data[kept]
        # Sequence after sequence, the old rows first: a sequence's row numbers say where each goes.
        base_S = (old_S + step.lengths_S).cumsum(0) - step.total_S
        read = data.new_empty(len(old) + len(data), size)
        read[base_S[owners(old_S)] + numbers(step.past_S - old_S, old_S)] = old
        read[base_S[step.sequence_T] + step.positions_T] = data
        return Readable(slot.record.decode(read, slot.dim), base_S)

    def _places(self, cache: Cache, keep: int | None) -> tuple[Places, Places]:
        """Of the rows that this step writes, and of those it can read: the last `keep` of any of its tokens."""
        metadata, step = cache.metadata, self.step
        assert metadata is not None
        key = (id(metadata), cache.stride, keep)
        known = self._known.get(key)
        if known is None:
            first_S, end_S = step.past_S // cache.stride, step.total_S // cache.stride
            oldest_S = torch.zeros_like(first_S)
            if keep is not None:
                oldest_S = (step.past_S - keep + 1).clamp_min(0)
            known = (self._rows(cache, first_S, end_S), self._rows(cache, oldest_S, end_S))
            self._known[key] = known
        return known

    def _rows(self, cache: Cache, first_S: Tensor, end_S: Tensor) -> Places:
        counts_S = end_S - first_S
        number_N = numbers(first_S, counts_S)
        pages = self._pages(cache, owners(counts_S), number_N // cache.rows_per_page)
        return Places(pages, number_N % cache.rows_per_page, counts_S.cumsum(0) - end_S)


def waves(caches: Iterable[Cache], metadata: Metadata) -> list[list[int]]:
    """The requests of a vLLM step in the order in which they must run: mostly all at once.

    vLLM counts a page as a prefix hit in the very step that fills it. Rows are written before they are read, so a layer
    may do both; a scan's state is there only when the request that fills its page has run.
    """
    count = len(metadata.lengths)
    before: dict[int, set[int]] = {s: set() for s in range(count)}
    for cache in {
        (id(c.metadata), c.tokens): c for c in caches if isinstance(c.slot, State)
    }.values():
        assert cache.metadata is not None
        spans = [
            (past // cache.tokens, (past + length) // cache.tokens)
            for past, length in zip(metadata.past, metadata.lengths, strict=True)
        ]
        if sum(first > 0 for first, _ in spans) == 0 or all(first == end for first, end in spans):
            continue
        pages = cache.metadata.pages_SK.tolist()
        filled = {pages[s][c]: s for s, (first, end) in enumerate(spans) for c in range(first, end)}
        for s, (first, _) in enumerate(spans):
            other = filled.get(pages[s][first - 1], s) if first else s
            before[s] |= {other} - {s}
    order: list[list[int]] = []
    left = list(range(count))
    while left:
        ready = [s for s in left if not before[s] & set(left)]
        assert ready, f"requests wait for each other: {before}"
        order.append(ready)
        left = [s for s in left if s not in ready]
    return order
