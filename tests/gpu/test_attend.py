"""attend_pages on the device: right by a tolerance, and a token's bits whatever the step that it comes in."""

from dataclasses import replace

import pytest
import torch

from tests.ops.attend_pages import Pack, World, compare_steps, plain, same
from tests.ops.conftest import nothing_waits, off
from unified_models.ops.attend import attend_pages

COUNTS = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 1000)
"""Tokens that each sequence brings, at most."""
TOTALS = (2500, 1030, 1024, 65, 0, 1)
E4M3 = torch.float8_e4m3fn
CASES = [  # query heads, groups, width, keep; dtype, codes
    (32, 2, 128, None, torch.bfloat16, None),
    (32, 2, 128, None, torch.bfloat16, E4M3),
    (32, 4, 128, None, torch.bfloat16, None),
    (6, 2, 96, 1100, torch.bfloat16, None),
    (4, 4, 16, 70, torch.bfloat16, torch.uint8),
    (40, 1, 256, 128, torch.bfloat16, None),
    (4, 2, 16, None, torch.float32, None),
    (32, 2, 128, 1500, torch.float32, None),
    (8, 4, 64, None, torch.float32, E4M3),
]
OFF = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""bfloat16: half an ulp of the output, and the probabilities' rounding."""
BOUND = 4000
"""Of the sequences' tokens."""


def packs(case: tuple) -> Pack:
    """Whole sequences, flat: what training sees."""
    world = World(TOTALS, *case)
    none = (0,) * len(TOTALS)
    return Pack(world, TOTALS, none, padding=5, per_page=None, device="cuda")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_has_one_value(case: tuple) -> None:
    """Whole, last tokens first to last in pages, one token a tile or many, and as they are decoded."""
    from unified_models.ops.attend import triton

    whole_pack = packs(case)
    whole = whole_pack.run(attend_pages)
    assert whole[-5:].eq(0).all()
    off = OFF[whole.dtype]
    torch.testing.assert_close(whole[:-5].double(), plain(whole_pack), rtol=off, atol=off)
    starts = whole_pack.who.starts_S1.tolist()
    each = whole_pack.world.H // whole_pack.world.G
    most_rows = triton.CORE_ROWS if whole.dtype == torch.bfloat16 else triton.FLOAT_ROWS
    for most in COUNTS:
        lengths = tuple(min(most, total) for total in TOTALS)
        past = tuple(total - n for total, n in zip(TOTALS, lengths, strict=True))
        step = Pack(whole_pack.world, lengths, past, most % 3, 16, BOUND, "cuda")
        ends = [whole[e - n : e] for e, n in zip(starts[1:], lengths, strict=True)]
        rows, count = torch.cat(ends), 0
        for tile in (None, 1, max(1, most_rows // each)):
            got = step.run(triton.attend, tile=tile)[: len(rows)]
            count += same(got, rows, f"{most} tokens, tiles of {tile}")
        got = replace(step, per_page=64).run(attend_pages)[: len(rows)]
        count += same(got, rows, "pages of 64")
        got = step.run(triton.attend, memory=1 << 20)[: len(rows)]
        count += same(got, rows, "in turns")
        print(f"{most} tokens a sequence: {count} values, none unequal")
        assert count == 5 * rows.numel() > 0
    count = compare_steps(attend_pages, replace(whole_pack, per_page=48, most=BOUND), whole)
    assert count > 10 * whole[0].numel()
    print(f"{count} values of tokens alone, none unequal")


@pytest.mark.parametrize("case", [CASES[0], CASES[3], CASES[6]], ids=str)
@pytest.mark.parametrize("most", [1, 64], ids=["decoded", "in tiles"])
def test_a_graph_may_hold_it(case: tuple, most: int) -> None:
    """Nothing waits for the device, and a replay has the values of a call."""
    lengths = tuple(min(most, total) for total in TOTALS)
    past = tuple(total - n for total, n in zip(TOTALS, lengths, strict=True))
    step = Pack(World(TOTALS, *case), lengths, past, padding=3, device="cuda")
    (k, v), q_THD = step.pages, step.q_THD
    how = {"scale": case[2] ** -0.5, "keep": case[3], "groups": case[1], "most": BOUND}
    want = attend_pages(q_THD, k, v, step.who, **how)
    with nothing_waits():
        again = attend_pages(q_THD, k, v, step.who, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_pages(q_THD, k, v, step.who, **how)
    out.fill_(torch.nan)
    graph.replay()
    count = same(again, want, "again") + same(out, want, "a replay")
    assert count == 2 * want.numel() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_those_of_the_lists(dtype: torch.dtype) -> None:
    """Of q and of the one tensor that holds keys and values, against the CPU's in float32."""
    totals = (150, 33, 0, 1)
    pack = Pack(World(totals, 8, 2, 64, 100, dtype), totals, (0,) * 4, 2, None)
    grads = []
    for device, exact in (("cuda", dtype), ("cpu", torch.float32)):
        here = replace(pack, device=device)
        q_THD, (k, v) = here.q_THD[:-2].to(exact), here.pages
        q_THD = torch.cat((q_THD, q_THD[:2])).requires_grad_()
        rows = k.values.nan_to_num().to(exact).requires_grad_()
        pages = [replace(pages, values=rows) for pages in (k, v)]
        out = attend_pages(q_THD, *pages, here.who, scale=0.2, keep=100, groups=2, most=150)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device)
        grad_q, grad_rows = torch.autograd.grad((out.float() * weights).sum(), (q_THD, rows))
        grads.append(
            (grad_q, grad_rows[k.table_SK[0, 0] :][:150], grad_rows[k.table_SK[1, 0] :][:33])
        )
    for got, want in zip(*grads, strict=True):
        if dtype == torch.float32:
            torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
        assert off(got.cpu(), want) < (1e-5 if dtype == torch.float32 else 1e-2)
        assert off(got.cpu().roll(1, 0), want) > 0.5, "a neighbour's gradient is another"
