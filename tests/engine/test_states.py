"""Scan states in pages: what a page holds, what it refuses to be read as, and that there are always enough of them."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unified_models.context import Rows, State
from unified_models.context.step import Step
from unified_models.engine.memory import PagedMemory, state_pages
from unified_models.engine.pool import PagePool
from unified_models.engine.states import NOTHING, StateStore
from unified_models.engine.table import PageTable

Q = 16


def paged(**options: Any) -> PagedMemory:
    slot = State((2, 3, 4), groups=1, chunk=Q)
    slot.path = "layer.state"
    sizes = {
        "cache_tokens": 400,
        "page_tokens": 16,
        "seats": 3,
        "step_tokens": 40,
        "state_slots": 3,
    }
    return PagedMemory([slot], device=torch.device("cpu"), poison=True, **sizes | options)


def only(memory: PagedMemory) -> StateStore:
    (store,) = memory.states.values()
    return store


class Runner:
    """Seats of a memory that are run by hand; the state after chunk c of seat s is full of 100 s + c + 1."""

    def __init__(self, memory: PagedMemory) -> None:
        self.memory, self.store = memory, only(memory)
        self.tokens = [0] * memory.seats

    def read(self, seats: list[int], lengths: list[int]) -> Tensor:
        step = Step.of(lengths, [self.tokens[s] for s in seats])
        return self.store.read(step, np.array(seats))

    def run(self, seats: list[int], lengths: list[int]) -> Tensor:
        step = Step.of(lengths, [self.tokens[s] for s in seats])
        for seat, length in zip(seats, lengths, strict=True):
            assert self.memory.grow(seat, self.tokens[seat] + length)
        before = self.memory.at(step, seats).states(step, self.store.slot)
        values = [
            100 * seat + chunk + 1
            for seat, length in zip(seats, lengths, strict=True)
            for chunk in range(self.tokens[seat] // Q, (self.tokens[seat] + length) // Q)
        ]
        new = torch.tensor(values, dtype=torch.float32)[:, None, None, None].expand(-1, 2, 3, 4)
        self.memory.at(step, seats).keep_states(step, self.store.slot, new)
        for seat, length in zip(seats, lengths, strict=True):
            self.tokens[seat] += length
            self.memory.settle(seat, self.tokens[seat], None)
        return before

    def expected(self, seats: list[int]) -> Tensor:
        values = [100 * s + self.tokens[s] // Q if self.tokens[s] >= Q else 0 for s in seats]
        return torch.tensor(values, dtype=torch.float32)[:, None, None, None].expand(-1, 2, 3, 4)


def test_each_sequence_reads_its_own_last_boundary() -> None:
    """Zeros before the first, whatever the pages held before; then the state at the last multiple of the chunk."""
    runner, compared = Runner(paged()), 0
    for seats, lengths in (
        ([0], [5]),
        ([0, 1], [10, 16]),
        ([1, 0, 2], [1, 1, 40]),
        ([2], [0]),
        ([2, 1], [7, 33]),
        ([0, 1, 2], [16, 15, 1]),
        ([2, 0], [1, 1]),
    ):
        want = runner.expected(seats)
        before = runner.run(seats, lengths)
        assert torch.equal(before, want)
        compared += len(before)
    assert compared == 14
    assert runner.tokens == [33, 65, 49]
    assert only(runner.memory).num_bytes == only(runner.memory).data_PX.numel() * 4


def test_a_freed_page_holds_nothing() -> None:
    runner = Runner(paged())
    runner.run([0, 1], [40, 20])
    store = runner.store
    assert (store.held_P2 != NOTHING).any()
    for seat in (0, 1):
        runner.memory.release(seat)
    assert (store.held_P2 == NOTHING).all()
    assert runner.memory.used_pages == 0
    (rows,) = runner.memory.stores.values()
    assert bool((rows.data_RB == 0xFF).all())


FAULTS = {
    "not-grown": "holds -1 rows from position -1",
    "other-sequence": "holds 16 rows from position 0; 16 from position 16 are needed",
    "other-chunk": "holds 4 rows from position 32; 16 from position 16 are needed",
    "copied": "holds -1 rows from position -1; 16 from position 16 are needed",
    "lost-rows": "holds 3 rows from position 32; 4 from position 32 are needed",
    "freed": "holds -1 rows from position -1",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_page_that_does_not_hold_what_is_needed_is_refused_D07_D08(fault: str) -> None:
    """Seat 0 has 36 tokens: a boundary at 32 (page 1 of the sequence), and 4 open rows (page 2)."""
    runner = Runner(paged())
    runner.run([0, 1], [36, 4])
    runner.run([1], [13])
    store, pages = runner.store, runner.store.table.pages_SK
    assert torch.equal(runner.read([0], [1]), runner.expected([0]))
    spare = store.table.pool.take()
    if fault == "not-grown":
        pages[0, 1] = spare
    elif fault == "other-sequence":
        pages[0, 1] = pages[1, 0]
    elif fault == "other-chunk":
        pages[0, 1] = pages[0, 2]
    elif fault == "copied":
        store.data_PX[spare] = store.data_PX[pages[0, 1]]
        pages[0, 1] = spare
    elif fault == "lost-rows":
        store.held_P2[pages[0, 2], 1] = 3
    else:
        store.scrub(int(pages[0, 1]))
    with pytest.raises(RuntimeError, match=rf"layer\.state: page \d+ {FAULTS[fault]}"):
        runner.read([1, 0], [1, 1])
    assert torch.equal(runner.read([1], [1]), runner.expected([1]))


def test_a_page_is_one_chunk() -> None:
    slot = State((1, 1, 1), groups=1, chunk=32)
    table = PageTable(PagePool(4), 16, 33, seats=1, most_tokens=64)
    with pytest.raises(AssertionError, match="a page is one chunk"):
        StateStore(slot, table, torch.device("cpu"))


@pytest.mark.parametrize("page_tokens", [3, 12, 32])
def test_pages_that_do_not_divide_a_chunk_are_refused_D07(page_tokens: int) -> None:
    told = (
        rf"layer\.state: a prefix may end after any {page_tokens} tokens .* chunk of 16 is no mult"
    )
    with pytest.raises(ValueError, match=told):
        paged(page_tokens=page_tokens)


def test_pages_of_states_D23() -> None:
    """By hand: 3 sequences, chunks of 16, steps of 40 tokens: 3 pages each and 2 * 2 more; never more than all tokens
    there can be need."""
    assert paged().num_bytes == 13 * (2 * 3 * 4 * 4 + Q * (6 + 4 + 2) * 4)
    assert state_pages(128, 32, 64, 10**6) == 96
    assert state_pages(128, 32, 8192, 10**6) == 96 + 128
    assert state_pages(16, 5, 1000, 64) == 20
    assert paged().state_slots == 3
    rows = [Rows(4, keep=3)]
    sizes = {"cache_tokens": 64, "page_tokens": 16, "seats": 3, "step_tokens": 40, "state_slots": 2}
    assert PagedMemory(rows, device=torch.device("cpu"), **sizes).state_slots is None


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    step_tokens=st.sampled_from([1, 2, 3, 15, 16, 17, 40, 300]),
    slots=st.integers(1, 6),
    cache_tokens=st.sampled_from([40, 400, 4000]),
)
def test_growth_never_fails_D23(seed: int, step_tokens: int, slots: int, cache_tokens: int) -> None:
    """As many sequences as there are slots, in steps of any mixture, leaving at any time: every page is there when it
    is asked for, and each newcomer is admitted for all that it may become."""
    memory = paged(
        seats=slots, state_slots=slots, step_tokens=step_tokens, cache_tokens=cache_tokens
    )
    (table,) = memory.tables.values()
    chance, tokens = random.Random(seed), [0] * slots
    for _ in range(40):
        budget = step_tokens
        for seat in chance.sample(range(slots), slots):
            wanted = chance.choice([0, 1, 2, Q - 1, Q, Q + 1, max(0, budget - 1), budget])
            length = min(wanted, budget, cache_tokens - tokens[seat])
            if length and not tokens[seat]:
                assert memory.room(seat, cache_tokens, step_tokens)
            assert memory.grow(seat, tokens[seat] + length)
            tokens[seat] += length
            budget -= length
        for seat in range(slots):
            memory.settle(seat, tokens[seat], None)
            assert len(table._held[seat]) <= 2
            if chance.random() < 0.1 or tokens[seat] == cache_tokens:
                memory.release(seat)
                tokens[seat] = 0
