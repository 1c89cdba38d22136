"""The page table of one group of slots: which page holds which tokens of each seat."""

import numpy as np
from numpy.typing import NDArray

from unified_models.engine.pool import PagePool

Numbers = NDArray[np.int64]


class PageTable:
    """Page k of a seat covers tokens [k * page_tokens, (k + 1) * page_tokens) of the sequence that sits there.

    keep: a token reads itself and the keep - 1 tokens before it, so pages wholly older than that go back to the pool
    (None: a sequence keeps all of its pages until it leaves).
    most_tokens: of a sequence. pages_SK: page of each (seat, number), int64; stale outside of what a seat holds.
    """

    def __init__(
        self, pool: PagePool, page_tokens: int, keep: int | None, seats: int, most_tokens: int
    ) -> None:
        self.pool, self.page_tokens, self.keep = pool, page_tokens, keep
        self.pages_SK = np.zeros((seats, -(-most_tokens // page_tokens)), np.int64)
        self._first = [0] * seats  # number of the oldest page held
        self._held: list[list[int]] = [[] for _ in range(seats)]
        self._named = [0] * seats  # pages of smaller numbers were offered to the pool

    def oldest(self, tokens: int) -> int:
        """The oldest position that the token at position `tokens`, the next one, can read."""
        return 0 if self.keep is None else max(0, tokens - self.keep + 1)

    def missing(self, seat: int, tokens: int) -> int:
        """How many pages the seat lacks to cover that many tokens."""
        return -(-tokens // self.page_tokens) - self._first[seat] - len(self._held[seat])

    def lacking(self, seat: int, tokens: int, step_tokens: int) -> int:
        """How many pages more the seat would need at the worst moment of running up to `tokens` tokens in steps of at
        most `step_tokens`."""
        most = -(-tokens // self.page_tokens) - self._first[seat]
        if self.keep is not None:
            most = min(most, window_pages(self.keep, self.page_tokens, step_tokens))
        return most - len(self._held[seat])

    def grow(self, seat: int, tokens: int) -> None:
        """Take the pages that the seat lacks; the caller has seen that they are available."""
        for _ in range(self.missing(seat, tokens)):
            held = self._held[seat]
            page = self.pool.take()
            held.append(page)
            self.pages_SK[seat, self._first[seat] + len(held) - 1] = page

    def name(self, seat: int, tokens: int, digests: list[bytes], block: int) -> None:
        """Offer each page that `tokens` tokens newly complete; digest i is that of the first (i + 1) * block tokens."""
        for k in range(self._named[seat], tokens // self.page_tokens):
            page = self._held[seat][k - self._first[seat]]
            self.pool.name(page, digests[(k + 1) * self.page_tokens // block - 1])
            self._named[seat] = k + 1

    def trim(self, seat: int, tokens: int) -> None:
        """Release what no later token reads, the sequence having `tokens` tokens."""
        gone = self.oldest(tokens) // self.page_tokens - self._first[seat]
        if gone > 0:
            for page in self._held[seat][:gone]:
                self.pool.release(page)
            del self._held[seat][:gone]
            self._first[seat] += gone

    def needed(self, tokens: int) -> range:
        """The numbers of the complete pages without which a sequence cannot go on after `tokens` tokens."""
        end = tokens // self.page_tokens
        return range(min(self.oldest(tokens) // self.page_tokens, end), end)

    def adopt(self, seat: int, tokens: int, digests: list[bytes], block: int) -> None:
        """Share the named pages that a sequence needs to go on after `tokens` tokens; the seat is empty."""
        assert not self._held[seat], f"seat {seat} is taken"
        numbers = self.needed(tokens)
        self._first[seat] = numbers.start
        self._named[seat] = numbers.stop
        for k in numbers:
            page = self.pool.find(digests[(k + 1) * self.page_tokens // block - 1])
            assert page is not None, "adopt() after the caller found every page"
            self.pool.share(page)
            self._held[seat].append(page)
            self.pages_SK[seat, k] = page

    def clear(self, seat: int) -> None:
        """Release everything; the newest pages will be reused first, since older ones serve more prefixes."""
        for page in reversed(self._held[seat]):
            self.pool.release(page)
        self._held[seat] = []
        self._first[seat] = self._named[seat] = 0


def window_pages(keep: int, page_tokens: int, step_tokens: int) -> int:
    """The most pages that a sequence of a sliding group holds at a time."""
    return -(-(keep - 1 + step_tokens) // page_tokens) + 1


def numbered(
    seats_S: Numbers, first_S: Numbers, end_S: Numbers
) -> tuple[Numbers, Numbers, Numbers]:
    """Seat and number of first .. end of each sequence, one sequence after the other; and where number 0 would be."""
    counts_S = end_S - first_S
    base_S = np.cumsum(counts_S) - end_S
    return seats_S.repeat(counts_S), np.arange(counts_S.sum()) - base_S.repeat(counts_S), base_S
