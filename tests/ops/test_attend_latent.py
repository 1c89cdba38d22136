"""attend_latent: one softmax over a list of rows and a sink, against float64, and rows whose bits never move."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.latent_pages import Pack, World, compare_steps, plain
from unified_models.ops.attend_latent import arithmetic, attend_latent, attend_latent_pages
from unified_models.ops.attend_latent.reference import attend_latent as reference

SCALE = 0.2


def lists(tokens: int, places: int, rows: int, fill: float = 0.7) -> Tensor:
    """Distinct rows in no order for each token, -1 between them; the last token has one row only."""
    index_TN = torch.stack([torch.randperm(max(rows, places))[:places] for _ in range(tokens)])
    index_TN[index_TN >= rows] = -1
    index_TN[torch.rand(tokens, places) > fill] = -1
    index_TN[:, places // 2] = torch.randint(rows, (tokens,))
    index_TN[-1, torch.arange(places) != places // 2] = -1
    return index_TN


def token_by_token(q: Tensor, rows: Tensor, sinks: Tensor | None, index_TN: Tensor) -> Tensor:
    sinks = {"sinks_H": sinks} if sinks is not None else {}
    outs = [
        reference(q[t], rows[index[index >= 0]], scale=SCALE, **sinks)
        for t, index in enumerate(index_TN)
    ]
    return torch.stack(outs)


@pytest.mark.parametrize("sinks", [True, False], ids=["sinks", "no-sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "dim", "places"), [(4, 128, 128), (3, 20, 64), (1, 7, 192)])
def test_attend_latent_and_backward(
    check_gradients, heads: int, dim: int, places: int, dtype: torch.dtype, sinks: bool
) -> None:
    rows = torch.randn(200, dim).to(dtype).requires_grad_()
    q = torch.randn(9, heads, dim).to(dtype).requires_grad_()
    index_TN = lists(9, places, len(rows))
    leaves = {"q": q, "rows": rows}
    if sinks:
        leaves["sinks"] = torch.randn(heads).requires_grad_()
    check_gradients(
        lambda: attend_latent(q, rows, index_TN, scale=SCALE, sinks_H=leaves.get("sinks")),
        lambda q, rows, sinks=None: token_by_token(q, rows, sinks, index_TN),
        leaves,
        terms=places + dim,
    )


def test_reference_gradient_by_finite_differences() -> None:
    q, rows, sinks = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3), (5, 3), (2,))
    )
    assert torch.autograd.gradcheck(
        lambda q, rows, sinks: reference(q, rows, scale=0.5, sinks_H=sinks), (q, rows, sinks)
    )


@pytest.mark.parametrize(("heads", "dim", "places"), [(4, 128, 64), (3, 20, 128), (1, 7, 64)])
def test_rows_keep_their_bits(check_rows, heads: int, dim: int, places: int) -> None:
    """The packs of tokens change; a row of every list is NaN in memory and in no list."""
    rows, sinks = torch.randn(90, dim), torch.randn(heads)
    rows[0] = math.nan
    index_TN = lists(150, places, 89) + 1
    index_TN[index_TN == 0] = -1
    count = check_rows(
        lambda q, index: attend_latent(q, rows, index, scale=SCALE, sinks_H=sinks),
        torch.randn(150, heads, dim),
        index_TN,
    )
    assert count > 0


def test_place_of_rows_and_empty_blocks_change_no_bit(same_bits) -> None:
    """The same list read from another place in memory, and with blocks of nothing before, between and after."""
    q, rows = torch.randn(6, 3, 24), torch.randn(100, 24)
    index_TN = lists(6, 128, 100)
    want = attend_latent(q, rows, index_TN, scale=SCALE)
    moved = torch.cat((torch.full((37, 24), math.nan), rows, torch.full((5, 24), math.nan)))
    there = torch.where(index_TN < 0, -1, index_TN + 37)
    nothing = torch.full((6, 64), -1)
    padded = torch.cat((nothing, there[:, :64], nothing, nothing, there[:, 64:], nothing), 1)
    count = same_bits(attend_latent(q, moved, there, scale=SCALE), want, "moved")
    count += same_bits(attend_latent(q, moved, padded, scale=SCALE), want, "padded")
    assert count == 2 * want.numel() > 0


def test_blocks_are_added_in_list_order(same_bits) -> None:
    """The written order, head by head and block by block, with the sink last in the denominator."""
    q, rows, sinks = torch.randn(5, 3, 32), torch.randn(200, 32), torch.randn(3)
    index_TN = lists(5, 192, 200)
    got = attend_latent(q, rows, index_TN, scale=SCALE, sinks_H=sinks)
    for t in range(5):
        blocks = index_TN[t].split(64)
        keys = [rows[b.clamp_min(0)].masked_fill((b < 0)[:, None], 0.0) for b in blocks]
        parts = [q[t] @ k.T * SCALE for k in keys]
        parts = [s.masked_fill(b < 0, -math.inf) for s, b in zip(parts, blocks, strict=True)]
        top = torch.stack([s.amax(-1) for s in parts]).amax(0)
        total, acc = torch.zeros(3), torch.zeros(3, 32)
        for s, k in zip(parts, keys, strict=True):
            e = torch.exp(s - top[:, None])
            total, acc = total + e.sum(-1), acc + e @ k
        want = acc / (total + torch.exp(sinks - top))[:, None]
        assert same_bits(got[t], want, f"token {t}") == 96


def test_chunks_of_tokens_change_no_bit(same_bits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens are taken in chunks that bound memory: forward and backward keep their bits, rows' sums their order."""
    q, rows = torch.randn(13, 3, 24), torch.randn(100, 24)
    index_TN, sinks, dout = lists(13, 128, 100), torch.randn(3), torch.randn(13, 3, 24)
    want = attend_latent(q, rows, index_TN, scale=SCALE, sinks_H=sinks)
    dq = arithmetic.backward(dout, q, rows, rows, index_TN, sinks, SCALE)[0]
    for size in (1, 4, 12):
        chunks = [slice(t, t + size) for t in range(0, 13, size)]
        monkeypatch.setattr(arithmetic, "token_chunks", lambda *sizes, chunks=chunks: chunks)
        got = attend_latent(q, rows, index_TN, scale=SCALE, sinks_H=sinks)
        assert same_bits(got, want, f"chunks of {size}") > 0
        assert (
            same_bits(arithmetic.backward(dout, q, rows, rows, index_TN, sinks, SCALE)[0], dq, "dq")
            > 0
        )


def test_token_chunks_bound_the_gathered_bytes() -> None:
    chunks = arithmetic.token_chunks(torch.empty(1000, 64, 512), torch.empty(1000, 640))
    size = chunks[0].stop
    assert 4 * size * (640 * 512 + 64 * (640 + 512)) <= arithmetic.CHUNK_BYTES
    assert [c.start for c in chunks] == list(range(0, 1000, size))
    assert chunks[-1].stop == 1000


@pytest.mark.parametrize("sink", [100.0, 1e4, -1e4], ids=lambda s: f"sink{s:g}")
def test_extreme_sinks_and_backward(sink: float) -> None:
    """exp(sink - max) may be inf: then the output is 0 and every gradient a number, that of the sink 0."""
    q = torch.randn(2, 1, 8).requires_grad_()
    rows = torch.randn(64, 8).requires_grad_()
    sinks = torch.tensor([sink]).requires_grad_()
    out = attend_latent(q, rows, torch.arange(64).expand(2, -1), scale=0.1, sinks_H=sinks)
    want = attend_latent(q, rows, torch.arange(64).expand(2, -1), scale=0.1)
    assert torch.equal(out, want if sink < 0 else torch.zeros_like(want))
    out.sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (q, rows, sinks))
    assert sinks.grad.item() == 0
    assert bool((q.grad == 0).all()) == (sink > 0)


def test_large_scores_and_backward(check_gradients) -> None:
    """Scores of several hundred: the maximum keeps every exponential finite."""
    q = (100 * torch.randn(3, 2, 16)).requires_grad_()
    rows = torch.randn(64, 16).requires_grad_()
    index_TN = torch.arange(64).expand(3, -1)
    check_gradients(
        lambda: attend_latent(q, rows, index_TN, scale=SCALE),
        lambda q, rows: token_by_token(q, rows, None, index_TN),
        {"q": q, "rows": rows},
        terms=64 * 256,  # a score's own error, some 100 float32 ulps, moves its weight by as much
    )


def test_a_row_listed_twice_counts_twice_and_backward(check_gradients) -> None:
    """An entry may also lie in the window: there is no merging of rows."""
    q = torch.randn(2, 2, 8).requires_grad_()
    rows = torch.randn(5, 8).requires_grad_()
    index_TN = torch.full((2, 64), -1)
    index_TN[:, :4] = torch.tensor([3, 1, 3, 3])
    check_gradients(
        lambda: attend_latent(q, rows, index_TN, scale=SCALE),
        lambda q, rows: token_by_token(q, rows[torch.tensor([0, 1, 2, 3, 4])], None, index_TN),
        {"q": q, "rows": rows},
        terms=64,
    )


def test_absent_rows_hold_nothing_and_backward(same_bits) -> None:
    """NaN in memory that no list names, row 0 included: no bit of the output, and no gradient, notices."""
    q, clean = torch.randn(5, 2, 24).requires_grad_(), torch.randn(90, 24)
    index_TN = lists(5, 64, 60)
    index_TN[index_TN == 0] = -1
    index_TN[:, 32] = index_TN[:, 32].clamp_min(1)
    dirty = clean.clone()
    dirty[0], dirty[60:] = math.nan, math.nan
    outs, grads = [], []
    for rows in (clean.requires_grad_(), dirty.requires_grad_()):
        outs.append(attend_latent(q, rows, index_TN, scale=SCALE))
        grads.append(torch.autograd.grad(outs[-1].sum(), (q, rows)))
    assert same_bits(outs[1].detach(), outs[0].detach(), "absent rows") > 0
    assert same_bits(grads[1], grads[0], "gradients") > 0
    assert bool((grads[1][1][0] == 0).all() and (grads[1][1][60:] == 0).all())


def test_no_tokens() -> None:
    out = attend_latent(
        torch.zeros(0, 2, 8), torch.zeros(3, 8), torch.zeros(0, 64, dtype=torch.int64), scale=1.0
    )
    assert out.shape == (0, 2, 8)


def test_a_list_has_whole_blocks() -> None:
    with pytest.raises(ValueError, match="multiple of 64 places long, got 63"):
        index_TN = torch.zeros(1, 63, dtype=torch.int64)
        attend_latent(torch.zeros(1, 1, 8), torch.zeros(1, 8), index_TN, scale=1.0)


TOTALS = (70, 0, 140, 9)
WORLDS = [  # heads, width, keep, stride, picks; dtype, rope
    (3, 24, 16, 2, 0, torch.float32, 0),
    (2, 20, 70, 1, 66, torch.bfloat16, 0),
    (2, 80, 5, 4, 3, torch.bfloat16, 16),
    (2, 24, 16, 0, 0, torch.float32, 0),
]


def on_cpu(pack: Pack) -> Tensor:
    return pack.run(attend_latent_pages, **pack.told())


@pytest.mark.parametrize("case", WORLDS, ids=str)
def test_attend_latent_pages(case: tuple, same_bits) -> None:
    """Right, and with the same bits whole and flat, in pages, and as tokens are decoded."""
    world = World(TOTALS, *case)
    whole_pack = Pack(world, TOTALS, (0,) * 4, padding=3, per_page=None)
    whole = on_cpu(whole_pack)
    assert whole[-3:].eq(0).all()
    torch.testing.assert_close(
        whole[:-3].to(torch.float64), plain(whole_pack), rtol=4e-3, atol=1e-3
    )
    count = same_bits(on_cpu(replace(whole_pack, per_page=48, more=70)), whole, "in pages")
    count += compare_steps(on_cpu, replace(whole_pack, per_page=16), whole)
    steps = replace(whole_pack, lengths=(30, 0, 17, 9), past=(40, 0, 123, 0), per_page=16)
    ends = torch.cat([whole[e - n : e] for e, n in zip((70, 210, 219), (30, 17, 9), strict=True)])
    count += same_bits(on_cpu(steps)[:-3], ends, "the last tokens")
    assert count > 2 * ends.numel()


def test_attend_latent_pages_backward(check_gradients) -> None:
    """To q, to both kinds of rows and to the sinks."""
    world = World((40, 9), 2, 12, 8, 2, 5, torch.float32)
    pack = Pack(world, world.totals, (0, 0), per_page=None)
    window, pool = pack.pages
    assert pool is not None
    leaves = {
        "q": pack.new(0, 0.0), "window": window.values.nan_to_num(),
        "pool": pool.values.nan_to_num(), "sinks": world.sinks_H.clone(),
    }  # fmt: skip
    for leaf in leaves.values():
        leaf.requires_grad_()

    def op(q: Tensor, window: Tensor, pool: Tensor, sinks: Tensor) -> Tensor:
        pages = (replace(p, values=x) for p, x in zip(pack.pages, (window, pool), strict=True))
        mine, entries = pages
        how: dict[str, Any] = {"scale": SCALE, "keep": 8, "picks_TK": pack.new(3, -1)}
        return attend_latent_pages(q, mine, pack.who, sinks_H=sinks, pool=entries, **how)

    def one_by_one(q: Tensor, window: Tensor, pool: Tensor, sinks: Tensor) -> Tensor:
        first, entry, outs = pack.pages[0].table_SK[:, 0], pack.pages[1].table_SK[:, 0], []
        for t, (s, p) in enumerate(zip(pack.who.sequence_T, pack.who.position_T, strict=True)):
            picks = pack.new(3, -1)[t]
            seen = window[first[s] + max(0, p - 7) : first[s] + p + 1]
            rows = torch.cat((pool[entry[s] + picks[picks >= 0]], seen))
            outs.append(reference(q[t], rows, scale=SCALE, sinks_H=sinks))
        return torch.stack(outs)

    check_gradients(lambda: op(**leaves), one_by_one, leaves, terms=128)


def test_attend_latent_pages_refuses() -> None:
    world = World((9,), 2, 80, 8, 2, 0, torch.bfloat16, 16)
    pack = Pack(world, (9,), (0,))
    window, pool = pack.pages
    q_THD, how = pack.new(0, 0.0), {"scale": 1.0, "keep": 8}
    refused = [
        ("'plain' or 'latent_fp8', not 'fp8'", q_THD, window, {"record": "fp8"}),
        ("plain rows are not of dtype torch.uint8", q_THD, window, {}),
        ("q is torch.float32", q_THD.float(), window, {"record": "latent_fp8"}),
        ("80 - rope 20 = 60", q_THD, window, {"record": "latent_fp8", "rope": 20}),
        ("1 to 64, not 80", q_THD, window, {"record": "latent_fp8", "rope": 80}),
        ("counts of visible entries or picks", q_THD, window, pack.told() | {"pool": pool}),
    ]
    for told, q, pages, options in refused:
        with pytest.raises(ValueError, match=told):
            attend_latent_pages(q, pages, pack.who, **how, **options)
    other = replace(window, values=torch.zeros(9, 80))
    with pytest.raises(
        ValueError, match=r"window's rows are torch\.uint8, the pool's torch\.float32"
    ):
        attend_latent_pages(q_THD, window, pack.who, pool=other, **how, **pack.told())
