"""attend_latent_pages on the device: right by a tolerance, and a token's bits whatever the step that it comes in."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import compare_bits, nothing_waits
from tests.ops.latent_pages import Pack, World, compare_steps, plain
from unified_models.ops.attend_latent import attend_latent_pages

COUNTS = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 1000)
"""Tokens that each sequence brings, at most."""
TOTALS = (1100, 515, 65, 0, 1)
CASES = [  # heads, width, keep, stride, picks; dtype, rope
    (64, 512, 128, 4, 100, torch.bfloat16, 64),
    (64, 512, 128, 1, 600, torch.bfloat16, 64),
    (64, 512, 128, 2, 0, torch.bfloat16, 64),
    (64, 512, 128, 0, 0, torch.bfloat16, 64),
    (80, 512, 128, 2, 0, torch.bfloat16, 0),
    (4, 128, 16, 4, 4, torch.bfloat16, 64),
    (3, 80, 70, 2, 0, torch.bfloat16, 16),
    (4, 24, 16, 2, 0, torch.bfloat16, 0),
    (4, 32, 8, 4, 2, torch.float32, 0),
    (20, 512, 128, 2, 0, torch.float32, 0),
]
OFF = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""bfloat16: half an ulp of the output, and the probabilities' rounding."""


def on_device(pack: Pack, **how: Any) -> Tensor:
    return pack.run(attend_latent_pages, **pack.told(), **how)


def kernels(pack: Pack, **how: Any) -> Tensor:
    from unified_models.ops.attend_latent import triton

    return pack.run(triton.attend_latent, rope=pack.told().get("rope", 0), **how)


def last(totals: tuple[int, ...], most: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The last tokens of each sequence, at most so many: lengths, and what was before."""
    lengths = tuple(min(most, total) for total in totals)
    return lengths, tuple(total - n for total, n in zip(totals, lengths, strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_token_has_one_value(case: tuple) -> None:
    """Whole and flat, as training sees it; last tokens first to last in pages of records; and as they are decoded."""
    world = World(TOTALS, *case)
    whole_pack = Pack(world, TOTALS, (0,) * len(TOTALS), 5, None, device="cuda")
    whole, off = on_device(whole_pack), OFF[case[5]]
    assert whole[-5:].eq(0).all()
    torch.testing.assert_close(whole[:-5].double().cpu(), plain(whole_pack), rtol=off, atol=off)
    ends = torch.tensor(TOTALS).cumsum(0).tolist()
    for most in COUNTS:
        lengths, past = last(TOTALS, most)
        step = Pack(world, lengths, past, most % 3, 64, device="cuda")
        rows = torch.cat([whole[e - n : e] for e, n in zip(ends, lengths, strict=True)])
        count = compare_bits(on_device(step)[: len(rows)], rows, f"{most} tokens")
        other = replace(step, per_page=48, more=1300)
        count += compare_bits(on_device(other)[: len(rows)], rows, f"{most} tokens, other pages")
        count += compare_bits(kernels(step, memory=1 << 20)[: len(rows)], rows, "in turns")
        print(f"{most} tokens a sequence: {count} values, none unequal")
        assert count == 3 * rows.numel() > 0
    count = compare_steps(on_device, replace(whole_pack, per_page=2), whole)
    assert count > 5 * whole[0].numel()
    print(f"{count} values of tokens alone, none unequal")


@pytest.mark.parametrize("case", [case for case in CASES if case[3] > 1], ids=str)
def test_no_entries_are_no_pool(case: tuple) -> None:
    """Tokens that see nothing of the pool have the bits that they have without one."""
    totals = (case[3] - 1, 40, 1)
    pack = Pack(World(totals, *case), totals, (0,) * 3, device="cuda")
    none = (pack.who.position_T + 1) // case[3] == 0

    def alone(*args: Any, **how: Any) -> Tensor:
        return attend_latent_pages(*args, **how | {"pool": None})

    count = compare_bits(on_device(pack)[none], pack.run(alone, **pack.told())[none], "no entries")
    assert count >= 2 * case[0] * case[1]


@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[3], CASES[8]], ids=str)
@pytest.mark.parametrize("most", [1, 64], ids=["decoded", "prefilled"])
def test_a_graph_may_hold_it(case: tuple, most: int) -> None:
    """Nothing waits for the device, and a replay has the values of a call."""
    step = Pack(World(TOTALS, *case), *last(TOTALS, most), padding=3, device="cuda")
    told: dict[str, Any] = {}

    def take(*args: Any, **how: Any) -> Tensor:
        told.update(args=args, how=how)
        return attend_latent_pages(*args, **how)

    want = step.run(take, **step.told())
    args, how = told["args"], told["how"]
    with nothing_waits():
        again = attend_latent_pages(*args, **how)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_latent_pages(*args, **how)
    out.fill_(torch.nan)
    graph.replay()
    count = compare_bits(again, want, "again") + compare_bits(out, want, "a replay")
    assert count == 2 * want.numel() > 0


@pytest.mark.parametrize("picks", [20, 0], ids=["picks", "entries"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradients_are_those_of_the_lists(dtype: torch.dtype, picks: int) -> None:
    """Of q, of both kinds of rows and of the sinks, against the CPU's in float32."""
    totals = (150, 33, 0, 1)
    pack = Pack(World(totals, 8, 64, 16, 2, picks, dtype), totals, (0,) * 4, 2, None)
    grads, _ = [], (pack.world.tokens, pack.world.sinks_H)
    for device, exact in (("cuda", dtype), ("cpu", torch.float32)):
        leaves: list[Tensor] = []

        def run(
            q_THD: Tensor, *args: Any, device=device, exact=exact, leaves=leaves, **how: Any
        ) -> Tensor:
            window, who = args
            pool, sinks_H = how.pop("pool"), how.pop("sinks_H")
            for x in (q_THD.nan_to_num(), window.values.nan_to_num(), pool.values.nan_to_num()):
                leaves.append(x.to(exact).requires_grad_())
            leaves.append(sinks_H.requires_grad_())
            window, pool = (
                replace(pages, values=x, table_SK=pages.table_SK)
                for pages, x in zip((window, pool), leaves[1:3], strict=True)
            )
            return attend_latent_pages(leaves[0], window, who, pool=pool, sinks_H=leaves[3], **how)

        torch.manual_seed(1)  # rows lie in one place on both
        here = replace(pack, device=device)
        out = here.run(run)
        weights = torch.linspace(-1, 1, out.numel()).view(out.shape).to(device)
        grads.append(torch.autograd.grad((out.float() * weights).sum(), leaves))
    off = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got.cpu().float(), want, rtol=off, atol=off)
        assert want.count_nonzero() > 0
