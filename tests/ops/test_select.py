"""select: the indexer's entries by one written rule: ties, NaN, short rows, and memory that does not grow."""

import math
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from tests.memory import Peak
from unified_models.ops import select as package
from unified_models.ops.select import scores, select, top
from unified_models.ops.select.reference import scores as reference_scores
from unified_models.ops.select.reference import top as reference_top


def random_step(tokens: int, heads: int, dim: int, rows: int) -> tuple[Tensor, ...]:
    """q, weights, rows, base, count"""
    base_T = torch.randint(0, rows // 2, (tokens,))
    count_T = (torch.rand(tokens) * (rows - base_T)).long()
    q, weights = torch.randn(tokens, heads, dim), torch.randn(tokens, heads)
    return q, weights, torch.randn(rows, dim), base_T, count_T


@pytest.mark.parametrize("k", [1, 4, 64, 512])
@pytest.mark.parametrize("heads", [1, 4, 16])
def test_select(heads: int, k: int) -> None:
    """Scores on whole numbers, so that float32 is exact and ties are many."""
    q, weights, rows, base_T, count_T = random_step(40, heads, 6, 300)
    q, weights, rows = q.round(), weights.round(), rows.round()
    picks = select(q, weights, rows, base_T, count_T, k)
    for t, (base, count) in enumerate(zip(base_T.tolist(), count_T.tolist(), strict=True)):
        s = reference_scores(q[t].double(), weights[t].double(), rows[base : base + count].double())
        assert picks[t].tolist() == reference_top(s, k)


def test_scores_against_float64() -> None:
    q, weights, rows, _, _ = random_step(5, 16, 128, 100)
    index = torch.randint(0, 100, (5, 64))
    got = scores(q, weights, rows, index)
    for t in range(5):
        want = reference_scores(q[t].double(), weights[t].double(), rows[index[t]].double())
        assert torch.allclose(
            got[t].double(), want, atol=1e-4
        )  # sums of 128 and of 16 float32 terms


@pytest.mark.parametrize(("heads", "dim"), [(1, 7), (3, 20), (16, 128)], ids=str)
def test_scores_keep_their_bits(check_rows, heads: int, dim: int) -> None:
    q, weights, rows, _, _ = random_step(150, heads, dim, 200)
    index = torch.randint(1, 200, (150, 128))
    rows[0] = math.nan  # in no list
    assert check_rows(lambda q, w, i: scores(q, w, rows, i), q, weights, index) > 0


def test_picks_keep_their_bits(check_rows) -> None:
    q, weights, rows, base_T, count_T = random_step(150, 4, 20, 300)
    count = check_rows(
        lambda q, w, b, c: select(q, w, rows, b, c, 16), q, weights, base_T, count_T + 1
    )
    assert count > 0


def test_picks_do_not_depend_on_what_else_is_in_memory() -> None:
    q, weights, rows, base_T, count_T = random_step(20, 4, 20, 300)
    want = select(q, weights, rows, base_T, count_T, 16)
    moved = torch.cat((torch.full((77, 20), math.nan), rows, torch.full((3, 20), math.nan)))
    assert torch.equal(select(q, weights, moved, base_T + 77, count_T, 16), want)
    longer = torch.cat((q, q[:1])), torch.cat((weights, weights[:1]))
    counts = torch.cat((count_T, torch.tensor([len(rows)])))
    bases = torch.cat((base_T, torch.tensor([0])))
    assert torch.equal(select(*longer, rows, bases, counts, 16)[:-1], want)


def test_no_gradient_to_backward() -> None:
    q, weights, rows, base_T, count_T = random_step(3, 4, 8, 20)
    picks = select(q.requires_grad_(), weights, rows.requires_grad_(), base_T, count_T, 4)
    assert not picks.requires_grad


NAN_ROWS = {  # scores, count, k, picks
    "all-nan": ([math.nan] * 4, 4, 3, [-1, -1, -1]),
    "one-nan": ([1.0, math.nan, 3.0, 2.0], 4, 3, [3, 2, 0]),
    "one-nan-short": ([1.0, math.nan, 3.0, 2.0], 4, 4, [3, 2, 0, -1]),
    "all-minus-inf": ([-math.inf] * 4, 4, 3, [3, 2, 1]),
    "k-above-valid": ([1.0, 3.0, 9.0, 9.0], 2, 3, [1, 0, -1]),
    "k-is-valid": ([1.0, 3.0, 2.0, 9.0], 3, 3, [2, 1, 0]),
    "none-valid": ([9.0] * 4, 0, 3, [-1, -1, -1]),
    "signed-zeros": ([0.0, -0.0, -1.0, -0.0], 4, 2, [3, 1]),
    "inf": ([math.inf, 0.0, math.inf, -math.inf], 4, 1, [2]),
}


@pytest.mark.parametrize("case", NAN_ROWS.values(), ids=[f"{n}-C01" for n in NAN_ROWS])
def test_rule(case: tuple) -> None:
    row, count, k, want = case
    got = top(torch.tensor([row, [0.0] * 4]), torch.tensor([count, 4]), k)
    assert got[0].tolist() == want
    assert reference_top(torch.tensor(row[:count]), k) == want


def test_nan_queries_pick_nothing_C01() -> None:
    q, weights, rows, base_T, count_T = random_step(3, 4, 8, 100)
    q[1] = math.nan
    picks = select(q, weights, rows, base_T, count_T.clamp_min(5), 4)
    assert picks[1].tolist() == [-1] * 4
    assert bool((picks[[0, 2]] >= 0).all())


@pytest.mark.parametrize("value", [0.0, 1.5], ids=["zeros", "equal"])
def test_600_equal_scores_C03(value: float) -> None:
    """k = 512 of 600 equal scores are the 512 latest, in each place of the batch and each of 25 repeats."""
    want = list(range(599, 87, -1))
    q = torch.zeros(1, 2, 4) + value
    for place in range(25):
        qs = torch.randn(25, 2, 4)
        qs[place] = q
        rows = torch.ones(600, 4)
        full = torch.full((25,), 600)
        picks = select(qs, torch.ones(25, 2), rows, torch.zeros_like(full), full, 512)
        assert picks[place].tolist() == want


def test_memory_of_64k_entries_C26(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 queries over 65536 entries: the picks do not depend on the chunk, and the workspace is bounded by it."""
    q, weights, rows = torch.randn(8, 2, 8), torch.randn(8, 2), torch.randn(65536, 8)
    base_T, count_T = torch.zeros(8, dtype=torch.int64), torch.full((8,), 65536)
    count_T[::2] = torch.tensor([0, 1, 600, 65535])
    one, some, whole = 1, 1 << 22, 1 << 40
    peaks, picks = {}, {}
    for size in (one, some, whole):
        monkeypatch.setattr(package, "CHUNK_BYTES", size)
        with Peak() if size > one else nullcontext(Peak()) as peak:
            picks[size] = select(q, weights, rows, base_T, count_T, 512)
        peaks[size] = peak.peak
    print(f"bytes at once, by the chunk's: {peaks}")
    assert torch.equal(picks[one], picks[whole])
    assert torch.equal(picks[some], picks[whole])
    filled = 4 * 65537 * 16  # one copy of the rows, which every chunk reads
    assert peaks[some] < 1.5 * some + filled
    assert peaks[whole] > 1.5 * peaks[some], "the whole fits a chunk: nothing is tested"
