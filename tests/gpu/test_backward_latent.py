"""The backward kernels of attend_latent_pages on the device: right by a tolerance at real sizes, and the same in every
run."""

from typing import Any

import pytest
import torch

from tests.ops.conftest import compare_bits, nothing_waits, off
from tests.ops.latent_backward import Trained
from tests.ops.latent_pages import Pack, World
from unified_models.ops.attend_latent import _rerun, attend_latent_pages

CASES = [  # heads, width, keep, stride, picks; sinks
    (64, 512, 128, 1, 512, True),
    (64, 512, 128, 4, 100, True),
    (64, 512, 128, 8, 0, True),
    (64, 512, 128, 0, 0, True),
    (64, 512, 128, 4, 512, False),
    (80, 512, 70, 2, 0, False),
    (5, 96, 16, 4, 20, True),
]
TOTALS = (700, 0, 1, 65, 3)
"""Tokens of sequences."""
PADDING = 5
OFF = 1e-2
"""Of a gradient's length: what is multiplied is rounded to bfloat16, the output too, and so is the gradient, each by
0.2% of a value at most."""


def trained(case: tuple, totals: tuple[int, ...] = TOTALS) -> Trained:
    torch.manual_seed(0)
    world = World(totals, *case[:5], torch.bfloat16)
    pack = Pack(world, totals, (0,) * len(totals), PADDING, None, device="cuda")
    return Trained(pack, sinks=case[5])


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_softmax(case: tuple) -> None:
    """Against float64, token by token; again with the same bits; without a wait; and an output that does not know."""
    step = trained(case)
    leaves = [x.detach().requires_grad_() for x in step.leaves]
    out = step.run(attend_latent_pages, leaves)
    with torch.no_grad():
        plain = step.run(attend_latent_pages, leaves)
    count = compare_bits(out.detach(), plain, "without gradients")
    got = torch.autograd.grad(out, leaves, step.dout, retain_graph=True)
    with nothing_waits():
        again = torch.autograd.grad(out, leaves, step.dout)
    count += compare_bits(again, got, "again")
    assert count > 2 * out.numel()
    print(f"{count} values, none unequal; {step.worst(got, OFF):.3%} off at most")


@pytest.mark.parametrize("case", [CASES[1], CASES[2], CASES[3]], ids=str)
def test_gradients_are_those_of_the_lists(case: tuple) -> None:
    """The torch expressions, over which the gradient went before."""
    step, found = trained(case, (150, 1, 0, 33)), []

    def rerun(q: Any, window: Any, who: Any, *, sinks_H: Any, pool: Any, **how: Any) -> Any:
        tensors = (q, window.values, None if pool is None else pool.values, sinks_H)
        return _rerun(tensors, window, pool, who, how | {"rope": 0})

    for op in (attend_latent_pages, rerun):
        leaves = [x.detach().nan_to_num().requires_grad_() for x in step.leaves]
        out = step.run(op, leaves)
        found.append(torch.autograd.grad(out, leaves, step.dout.nan_to_num()))
    for name, got, want in zip(step.names, *found, strict=True):
        print(f"{name}: {off(got, want):.3%} off")
        assert off(got, want) < OFF, name
        assert off(got.roll(1, 0), want) > 0.5, f"{name}: a neighbour's gradient is another"


@pytest.mark.parametrize("case", [CASES[0], CASES[2]], ids=str)
def test_turns_change_little(case: tuple) -> None:
    """Less memory, more turns: rows' gradients off by no more than roundings, dq's bits the same; each the same in
    every run."""
    from unified_models.ops.attend_latent import backward_triton, triton

    step = trained(case)
    lse_TH = torch.full(step.q.shape[:2], torch.nan, device="cuda")
    out = step.run(triton.attend_latent, step.leaves, lse_TH=lse_TH)

    def gradients(**how: Any) -> list[Any]:
        found = backward_triton.gradients(
            step.dout, step.q, step.window, step.who, out, lse_TH, pool=step.pool,
            sinks_H=step.sinks_H, **step.how, **how,
        )  # fmt: skip
        return list(found)

    want = gradients()
    for memory in (1 << 20, 50 << 20, 200 << 20):
        got, again = gradients(memory=memory), gradients(memory=memory)
        assert compare_bits(again, got, f"{memory} bytes") > 0
        assert compare_bits(got[0], want[0], "dq") > 0
        assert max(map(off, got[1:], want[1:])) < 1e-3
