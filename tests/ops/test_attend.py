"""attend: query heads in groups over lists of key and value rows, against float64, and rows whose bits never move."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops.attend_pages import Pack, World, compare_steps, plain, same
from unified_models.context import Rows
from unified_models.context.lists import window_lists
from unified_models.context.step import Step
from unified_models.ops.attend import arithmetic, attend, attend_pages
from unified_models.ops.attend.reference import attend as reference

SCALE = 0.2
SHAPES = [(4, 2, 32, 128), (6, 1, 20, 64), (3, 3, 7, 192), (1, 1, 64, 64)]  # H, G, D, places


def lists(tokens: int, places: int, rows: int) -> Tensor:
    """Distinct rows in no order for each token, -1 between them; the last token has one row only."""
    index_TN = torch.stack([torch.randperm(max(rows, places))[:places] for _ in range(tokens)])
    index_TN[index_TN >= rows] = -1
    index_TN[torch.rand(tokens, places) > 0.7] = -1
    index_TN[:, places // 2] = torch.randint(rows, (tokens,))
    index_TN[-1, torch.arange(places) != places // 2] = -1
    return index_TN


def token_by_token(q: Tensor, k: Tensor, v: Tensor, index_TN: Tensor) -> Tensor:
    seen = [index[index >= 0] for index in index_TN]
    return torch.stack([reference(q[t], k[n], v[n], scale=SCALE) for t, n in enumerate(seen)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("H", "G", "D", "places"), SHAPES)
def test_attend_and_backward(check_gradients, H: int, G: int, D: int, places: int, dtype) -> None:
    q = torch.randn(9, H, D).to(dtype).requires_grad_()
    k, v = (torch.randn(200, G, D).to(dtype).requires_grad_() for _ in "kv")
    index_TN = lists(9, places, 200)
    check_gradients(
        lambda: attend(q, k, v, index_TN, scale=SCALE),
        lambda q, k, v: token_by_token(q, k, v, index_TN),
        {"q": q, "k": k, "v": v},
        terms=places + D,
    )


def test_reference_gradient_by_finite_differences() -> None:
    shapes = ((4, 3), (5, 2, 3), (5, 2, 3))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(lambda q, k, v: reference(q, k, v, scale=0.5), inputs)


def test_a_head_reads_its_own_group(same_bits) -> None:
    """Head h reads key head h G / H: each group alone has the bits that it has among the others."""
    q, k, v = torch.randn(6, 6, 32), torch.randn(90, 3, 32), torch.randn(90, 3, 32)
    index_TN, count = lists(6, 64, 90), 0
    whole = attend(q, k, v, index_TN, scale=SCALE)
    for g in range(3):
        heads = slice(2 * g, 2 * g + 2)
        one = slice(g, g + 1)
        alone = attend(q[:, heads], k[:, one], v[:, one], index_TN, scale=SCALE)
        count += same_bits(alone, whole[:, heads], f"group {g}")
    assert count == whole.numel() > 0


@pytest.mark.parametrize(("H", "G", "D", "places"), SHAPES)
def test_rows_keep_their_bits(check_rows, H: int, G: int, D: int, places: int) -> None:
    """The packs of tokens change; memory holds rows of NaN that no list names."""
    k, v = torch.randn(90, G, D), torch.randn(90, G, D)
    k[0], v[0], k[-1], v[-1] = (math.nan,) * 4
    index_TN = lists(150, places, 88) + 1
    index_TN[index_TN == 0] = -1
    count = check_rows(
        lambda q, index: attend(q, k, v, index, scale=SCALE), torch.randn(150, H, D), index_TN
    )
    assert count > 0


def causal(length: int, past: int, first: int = 0) -> Tensor:
    """Lists over everything so far; row p of the sequence lies at place p - first."""
    return window_lists(Step.of([length], [past]), Rows(1), torch.tensor([-first]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("H", "G", "D"), [(4, 2, 32), (32, 2, 128)], ids=["tiny", "30B"])
def test_cuts_change_no_bit(same_bits, threads, H: int, G: int, D: int, dtype) -> None:
    """A whole sequence against the steps it may be cut into: lists grow, memory beyond the step is NaN."""
    T, count = 131, 0
    q, k, v = (torch.randn(T, heads, D).to(dtype) for heads in (H, G, G))
    whole = attend(q, k, v, causal(T, 0), scale=D**-0.5)
    for past, end in (
        (0, 1),
        (0, 64),
        (63, 64),
        (64, 65),
        (60, 131),
        (127, 128),
        (128, 130),
        (130, 131),
    ):
        rows = [t.clone() for t in (k, v)]
        for t in rows:
            t[end:] = math.nan
        got = attend(q[past:end], *rows, causal(end - past, past), scale=D**-0.5)
        count += same_bits(got, whole[past:end], f"{past} to {end}")
    assert count > 0
    if dtype == torch.float32:
        keys, values = (t.repeat_interleave(H // G, 1) for t in (k, v))
        scores = torch.einsum("thd,nhd->htn", q, keys) * D**-0.5
        hidden = torch.ones(T, T).triu(1).bool()
        p = torch.softmax(scores.masked_fill(hidden, -torch.inf), -1)
        plain = torch.einsum("htn,nhd->thd", p, values)
        assert torch.allclose(plain, whole, atol=1e-5)
        with pytest.raises(AssertionError, match="differ"):
            same_bits(plain, whole, "one softmax over all keys")


def test_blocks_are_added_in_list_order(same_bits) -> None:
    """The written order, head by head and block by block."""
    q, k, v = torch.randn(5, 4, 32), torch.randn(200, 2, 32), torch.randn(200, 2, 32)
    index_TN, count = lists(5, 192, 200), 0
    got = attend(q, k, v, index_TN, scale=SCALE)
    for t in range(5):
        for g in range(2):
            blocks = index_TN[t].split(64)
            keys, values = (
                [r[b.clamp_min(0), g].masked_fill((b < 0)[:, None], 0.0) for b in blocks]
                for r in (k, v)
            )
            parts = [q[t, 2 * g : 2 * g + 2] @ rows.T * SCALE for rows in keys]
            parts = [s.masked_fill(b < 0, -math.inf) for s, b in zip(parts, blocks, strict=True)]
            top = torch.stack([s.amax(-1) for s in parts]).amax(0)
            total, acc = torch.zeros(2), torch.zeros(2, 32)
            for s, rows in zip(parts, values, strict=True):
                e = torch.exp(s - top[:, None])
                total, acc = total + e.sum(-1), acc + e @ rows
            mine = got[t, 2 * g : 2 * g + 2]
            count += same_bits(mine, acc / total[:, None], f"token {t}, group {g}")
    assert count == got.numel() > 0


def test_absent_rows_hold_nothing_and_backward(same_bits) -> None:
    """NaN in memory that no list names, row 0 included: no bit of the output, and no gradient, notices."""
    q = torch.randn(5, 4, 24).requires_grad_()
    clean = torch.randn(90, 4, 24)
    index_TN = lists(5, 64, 60)
    index_TN[index_TN == 0] = -1
    index_TN[:, 32] = index_TN[:, 32].clamp_min(1)
    dirty = clean.clone()
    dirty[0], dirty[60:] = math.nan, math.nan
    outs, grads = [], []
    for rows in (clean.requires_grad_(), dirty.requires_grad_()):
        outs.append(attend(q, *rows.chunk(2, 1), index_TN, scale=SCALE))
        grads.append(torch.autograd.grad(outs[-1].sum(), (q, rows)))
    assert same_bits(outs[1].detach(), outs[0].detach(), "absent rows") > 0
    assert same_bits(grads[1], grads[0], "gradients") > 0
    assert bool((grads[1][1][0] == 0).all() and (grads[1][1][60:] == 0).all())


def test_chunks_of_tokens_change_no_bit(same_bits, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = torch.randn(13, 4, 24), torch.randn(100, 2, 24), torch.randn(100, 2, 24)
    index_TN = lists(13, 128, 100)
    want = attend(q, k, v, index_TN, scale=SCALE)
    for size in (1, 4, 12):
        chunks = [slice(t, t + size) for t in range(0, 13, size)]
        monkeypatch.setattr(arithmetic, "token_chunks", lambda *sizes, chunks=chunks: chunks)
        assert same_bits(attend(q, k, v, index_TN, scale=SCALE), want, f"chunks of {size}") > 0


def test_large_scores_and_backward() -> None:
    """Scores of several hundred: the maximum keeps every exponential finite."""
    q = (100 * torch.randn(3, 4, 16)).requires_grad_()
    k, v = (torch.randn(64, 2, 16).requires_grad_() for _ in "kv")
    out = attend(q, k, v, torch.arange(64).expand(3, -1), scale=SCALE)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(bool(t.isfinite().all()) for t in (out, *grads))
    want = token_by_token(q.double(), k.double(), v.double(), torch.arange(64).expand(3, -1))
    assert torch.allclose(out.double(), want, atol=1e-3)


def test_no_tokens() -> None:
    index_TN = torch.zeros(0, 64, dtype=torch.int64)
    rows = torch.zeros(3, 1, 8)
    assert attend(torch.zeros(0, 2, 8), rows, rows, index_TN, scale=1.0).shape == (0, 2, 8)


def test_what_does_not_fit_is_refused() -> None:
    rows, index_TN = torch.zeros(3, 2, 8), torch.zeros(1, 64, dtype=torch.int64)
    with pytest.raises(ValueError, match="3 query heads do not divide over 2 key heads"):
        attend(torch.zeros(1, 3, 8), rows, rows, index_TN, scale=1.0)
    with pytest.raises(ValueError, match="a list is a multiple of 64 places long, got 65"):
        attend(torch.zeros(1, 4, 8), rows, rows, torch.zeros(1, 65, dtype=torch.int64), scale=1.0)


CASES = [(4, 2, 16, None), (6, 1, 24, 70), (3, 3, 32, 5)]  # H, G, D, keep
LENGTHS, PAST = (1, 40, 0, 33, 2, 0), (150, 0, 0, 64, 62, 0)
TOTALS = tuple(p + n for p, n in zip(PAST, LENGTHS, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("H", "G", "D", "keep"), CASES)
def test_attend_pages_and_backward(check_gradients, H: int, G: int, D: int, keep, dtype) -> None:
    """Flat rows, keys and values in one tensor; each token against a softmax over what it sees."""
    pack = Pack(World(TOTALS, H, G, D, keep, dtype), LENGTHS, PAST, per_page=None)
    (k, v), q, seen = pack.pages, pack.q_THD.requires_grad_(), []
    rows = k.values.nan_to_num().requires_grad_()
    for s, p in zip(pack.who.sequence_T.tolist(), pack.who.position_T.tolist(), strict=True):
        base = int(k.table_SK[s, 0])
        seen.append(slice(base + (0 if keep is None else max(0, p - keep + 1)), base + p + 1))

    def plain(q: Tensor, rows: Tensor) -> Tensor:
        k_RGD, v_RGD = rows.unflatten(1, (2, G, D)).unbind(1)
        outs = [
            reference(q[t], k_RGD[n], v_RGD[n], scale=pack.world.D**-0.5)
            for t, n in enumerate(seen)
        ]
        return torch.stack(outs)

    pages = replace(k, values=rows), replace(v, values=rows)
    how = {"scale": D**-0.5, "keep": keep, "groups": G, "most": 200}
    check_gradients(
        lambda: attend_pages(q, *pages, pack.who, **how), plain, {"q": q, "rows": rows},
        terms=max(TOTALS) + D,
    )  # fmt: skip


@pytest.mark.parametrize("codes", [None, torch.uint8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("H", "G", "D", "keep"), CASES)
def test_pages_change_no_bit(H: int, G: int, D: int, keep, codes) -> None:
    """Pages of any size, and flat rows; a longer bound; the step cut into single tokens; NaN beyond what is seen."""
    pack = Pack(World(TOTALS, H, G, D, keep, torch.bfloat16, codes), LENGTHS, PAST, padding=3)
    whole, count = pack.run(attend_pages), 0
    assert whole[-3:].eq(0).all()
    torch.testing.assert_close(whole[:-3].double(), plain(pack), rtol=1e-2, atol=1e-2)
    for other in (
        replace(pack, per_page=64),
        replace(pack, per_page=None),
        replace(pack, per_page=7, most=500),
    ):
        count += same(other.run(attend_pages), whole, str(other.per_page))
    count += compare_steps(attend_pages, pack, whole)
    assert count > 3 * whole.numel()


def test_codes_are_dequantized_first() -> None:
    world = World((70,), 4, 2, 16, None, torch.float32, torch.float8_e4m3fn)
    pack = Pack(world, (70,), (0,), per_page=None)
    k, lists = pack.pages[0], causal(70, 0)
    base = int(k.table_SK[0, 0])
    k_RGD, v_RGD = k.values[base:].float().unflatten(1, (2, 2, 16)).unbind(1)
    want = attend(pack.q_THD, k_RGD * 0.7, v_RGD * 1.3, lists, scale=0.25)
    assert torch.equal(pack.run(attend_pages), want)


def test_pages_that_do_not_fit_are_refused() -> None:
    world = World((3,), 4, 2, 16, None, torch.float32)
    q, (k, v), who = (pack := Pack(world, (3,), (0,))).q_THD, pack.pages, pack.who
    how = {"scale": 1.0, "keep": None, "most": 3}
    with pytest.raises(ValueError, match="4 query heads do not divide over 3 key heads"):
        attend_pages(q, k, v, who, groups=3, **how)
    with pytest.raises(ValueError, match=r"keys are torch.float32, values torch.bfloat16"):
        attend_pages(q, k, replace(v, values=v.values.bfloat16()), who, groups=2, **how)
    ones = (torch.ones(()), torch.ones(()))
    with pytest.raises(ValueError, match=r"torch.float32 rows, with scales"):
        attend_pages(q, k, v, who, groups=2, scales=ones, **how)
    k, v = (replace(x, values=x.values.to(torch.float8_e4m3fn)) for x in (k, v))
    with pytest.raises(ValueError, match=r"torch.float8_e4m3fn rows, without scales"):
        attend_pages(q, k, v, who, groups=2, **how)
