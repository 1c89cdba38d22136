"""Which rows each token reads, against masks drawn by brute force: windows, entries, picks, windows that close, taps,
and the chunks and tiles of a scan."""

import itertools

import pytest
import torch
from torch import Tensor

from unified_models.context import Entries, Pool, Rows, State
from unified_models.context.lists import (
    numbers,
    pool_lists,
    scan_grid,
    tap_rows,
    window_lists,
    window_rows,
)
from unified_models.context.memory import Readable, closed
from unified_models.context.step import Step

WINDOWS = [1, 16, 64, 65, 128, None]
STEPS = {  # lengths, past
    "pack": ([0, 1, 63, 64, 65, 130], None),
    "decode": ([1] * 9, [0, 1, 62, 63, 64, 65, 126, 127, 128]),
    "two-on-1-127-128-129-C19": ([2] * 4, [1, 127, 128, 129]),
    "mixed": ([3, 0, 1, 70, 2], [62, 5, 127, 60, 190]),
    "nobody": ([], []),
}


def places(step: Step) -> list[tuple[int, int]]:
    """(sequence, position) of every token of a step."""
    return [
        (s, p)
        for s, (n, past) in enumerate(zip(step.lengths, step.past, strict=True))
        for p in range(past, past + n)
    ]


def random_bases(step: Step) -> Tensor:
    """Row 0 of each sequence, somewhere; early rows may be gone, so a base may be negative."""
    return torch.randint(-5, 1000, (len(step.lengths),))


@pytest.mark.parametrize("keep", WINDOWS, ids=lambda n: f"window{n}")
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_window_lists(case: tuple, keep: int | None) -> None:
    step = Step.of(*case)
    base_S = random_bases(step)
    lists = window_lists(step, Rows(4, keep=keep), base_S)
    assert lists.shape[0] == step.num_tokens
    assert lists.shape[1] % 64 == 0
    for (s, p), row in zip(places(step), lists.tolist(), strict=True):
        oldest = 0 if keep is None else max(0, p - keep + 1)
        first = oldest - oldest % 64  # of the absolute block that the oldest lies in
        want = [-1] * len(row)
        for position in range(oldest, p + 1):
            want[position - first] = int(base_S[s]) + position
        assert row == want, f"sequence {s}, position {p}"


@pytest.mark.parametrize("keep", [16, 64, 65, 128], ids=lambda n: f"window{n}")
def test_a_positions_place_in_its_block_never_moves(keep: int) -> None:
    """The same token in a pack and as a step of one: the same list."""
    whole = window_lists(Step.of([200]), Rows(4, keep=keep), torch.tensor([0]))
    for p in (0, 62, 63, 64, 65, 126, 127, 128, 129, 199):
        alone = window_lists(Step.of([1], [p]), Rows(4, keep=keep), torch.tensor([0]))
        assert torch.equal(alone[0], whole[p])


@pytest.mark.parametrize("stride", [4, 128])
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_pool_lists_without_picks(case: tuple, stride: int) -> None:
    """All visible entries ascending: entry w of positions from w * stride + stride - 1 on."""
    step = Step.of(*case)
    base_S = random_bases(step).abs()
    count_T = (step.positions_T + 1) // stride
    lists = pool_lists(
        step, Pool(Entries(4, stride=stride), Readable(torch.zeros(0, 4), base_S), count_T), None
    )
    assert lists.shape[1] % 64 == 0
    for (s, p), row in zip(places(step), lists.tolist(), strict=True):
        seen = [w for w in range(1000) if p >= w * stride + stride - 1]
        want = [int(base_S[s]) + w for w in seen]
        assert row == want + [-1] * (len(row) - len(want)), f"sequence {s}, position {p}"


def test_pool_lists_with_picks() -> None:
    """In the order of the picks, whole blocks, -1 where there is none."""
    step = Step.of([2, 1], [10, 20])
    pool = Pool(
        Entries(4, stride=4),
        Readable(torch.zeros(0, 4), torch.tensor([7, 100])),
        torch.tensor([2, 3, 5]),
    )
    picks_TK = torch.tensor([[1, 0, -1], [2, -1, -1], [4, 3, 0]])
    lists = pool_lists(step, pool, picks_TK)
    assert lists[:, :3].tolist() == [[8, 7, -1], [9, -1, -1], [104, 103, 100]]
    assert bool((lists[:, 3:] == -1).all())
    assert lists.shape == (3, 64)


@pytest.mark.parametrize("pick", [2, 3, 1 << 40])
def test_a_pick_of_an_open_window_is_refused(pick: int) -> None:
    slot = Entries(4, stride=4)
    slot.path = "blocks.2.attention.compressor.entries"
    pool = Pool(slot, Readable(torch.zeros(9, 4), torch.tensor([0])), torch.tensor([2, 9]))
    with pytest.raises(ValueError, match=r"blocks\.2.*names an entry whose window has not closed"):
        pool_lists(Step.of([2], [10]), pool, torch.tensor([[pick, 0], [1, 0]]))


@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapping"])
@pytest.mark.parametrize("stride", [1, 4])
def test_closing_windows(stride: int, overlap: bool) -> None:
    """Every past 0..9 with every length 0..9, all in one step of 100 sequences."""
    slot = Entries(4, stride=stride, overlap=overlap)
    past, lengths = zip(*itertools.product(range(10), range(10)), strict=True)
    step = Step.of(lengths, past)
    base_S = torch.randint(0, 10000, (len(past),)) - step.past_S
    first_S, counts_S = closed(step, slot)
    assert int(counts_S.sum()) > 0
    rows = iter(window_rows(slot, first_S, counts_S, base_S).tolist())
    told = iter(numbers(first_S, counts_S).tolist())
    for s, (before, new) in enumerate(zip(past, lengths, strict=True)):
        for last in range(before, before + new):  # the token that closes a window is its last
            if (last + 1) % stride:
                continue
            seen = range(last + 1 - slot.span, last + 1)
            assert next(rows) == [-1 if p < 0 else int(base_S[s]) + p for p in seen]
            assert next(told) == last // stride
    assert next(rows, None) is next(told, None) is None


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_tap_rows(case: tuple, taps: int) -> None:
    """The last rows, oldest first; positions are the sequence's own, whatever it brought before."""
    step = Step.of(*case)
    base_S = random_bases(step).abs() + 5
    index = tap_rows(step, Rows(4, keep=taps), base_S)
    assert index.shape == (step.num_tokens, taps)
    for (s, p), row in zip(places(step), index.tolist(), strict=True):
        want = [p - taps + 1 + k for k in range(taps)]
        assert row == [-1 if q < 0 else int(base_S[s]) + q for q in want]


@pytest.mark.parametrize("chunk", [7, 16, 24, 128])
@pytest.mark.parametrize("case", STEPS.values(), ids=STEPS)
def test_scan_grid_D04(case: tuple, chunk: int) -> None:
    """Chunks lie on each sequence's own positions: those with new tokens, all their rows so far, and the tiles of 16
    places in which the new ones are."""
    step = Step.of(*case)
    base_S = random_bases(step).abs() + 200
    grid = scan_grid(step, State((1, 1, 1), groups=1, chunk=chunk), base_S)
    new = places(step)
    chunks = list(dict.fromkeys((s, p // chunk) for s, p in new))
    assert grid.depth == max([0, *(1 + c - step.past[s] // chunk for s, c in chunks)])
    assert grid.sequence_U.tolist() == [s for s, _ in chunks]
    assert grid.number_U.tolist() == [c - step.past[s] // chunk for s, c in chunks]
    total = step.total_S.tolist()
    assert grid.full_U.tolist() == [(c + 1) * chunk <= total[s] for s, c in chunks]
    whole = -(-chunk // 16) * 16
    assert grid.rows_UQ.shape == (len(chunks), whole)
    for (s, c), row in zip(chunks, grid.rows_UQ.tolist(), strict=True):
        there = range(c * chunk, min((c + 1) * chunk, total[s]))
        assert row == [int(base_S[s]) + p for p in there] + [-1] * (whole - len(there))
    tiles = list(dict.fromkeys((chunks.index((s, p // chunk)), p % chunk // 16) for s, p in new))
    got = list(zip(grid.chunk_V.tolist(), grid.tile_V.tolist(), strict=True))
    assert got == tiles
    token = {place: t for t, place in enumerate(new)}
    for (u, tile), row in zip(tiles, grid.tokens_VL.tolist(), strict=True):
        s, c = chunks[u]
        inside = [16 * tile + i for i in range(16)]
        assert row == [token.get((s, c * chunk + i), -1) if i < chunk else -1 for i in inside]
    read = grid.tokens_VL.flatten()
    assert read[read >= 0].tolist() == list(range(step.num_tokens))


def test_positions_and_owners() -> None:
    step = Step.of([2, 0, 3], [5, 1, 0])
    assert step.positions_T.tolist() == [5, 6, 0, 1, 2]
    assert step.sequence_T.tolist() == [0, 0, 2, 2, 2]
    assert step.starts_S.tolist() == [0, 2, 2, 5]
    assert step.total_S.tolist() == [7, 1, 3]
    with pytest.raises(AssertionError, match=r"lengths \[1\], past \[-1\]"):
        Step.of([1], [-1])
