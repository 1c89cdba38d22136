"""Gradients of latent attention over flat rows in Triton's numpy interpreter: `TRITON_INTERPRET=1 python -m
tests.ops.triton_latent_backward_child`.

A process of its own, since Triton decides on import. float32 shows that the formulas are right; bfloat16 that what is
rounded is no more than a GPU's products round. The truth is float64 autograd of one softmax for each token. Bits on a
GPU are tests/gpu/test_backward_latent.py's affair.
"""

from typing import Any

import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.ops.conftest import compare_bits, off
from tests.ops.latent_backward import Trained
from tests.ops.latent_pages import Pack, World
from tests.ops.triton_attend_child import exact_dot
from unified_models.ops.attend_latent import _OverFlatRows, backward_triton, triton

CASES = [  # heads, width, keep, stride, picks; dtype
    (4, 20, 16, 2, 0, torch.float32),
    (3, 48, 70, 1, 66, torch.float32),
    (66, 24, 16, 4, 5, torch.float32),
    (4, 140, 5, 0, 0, torch.float32),
    (3, 48, 70, 1, 66, torch.bfloat16),
    (4, 24, 16, 0, 0, torch.bfloat16),
]
LENGTHS = (1, 9, 0, 1, 0)
"""Of sequences; the last is padding."""
OFF = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
"""Of a gradient's length. The interpreter cuts bfloat16 off where a GPU rounds it."""


def pack_of(case: tuple, more: int = 0) -> Pack:
    """Tokens of each sequence; the first has a past, as long as what it may read."""
    past = (70 if case[4] > 64 else 20, 0, 0, 0, 0)
    totals = tuple(p + n for p, n in zip(past, LENGTHS, strict=True))
    return Pack(World(totals, *case), LENGTHS, past, 2, None, more=more)


class Case(Trained):
    """A step, and what the forward keeps of it."""

    def __init__(self, pack: Pack, **how: bool) -> None:
        super().__init__(pack, **how)
        self.lse_TH = torch.full(self.q.shape[:2], torch.nan)
        self.out = self.forward(self.lse_TH)

    def forward(self, lse_TH: Tensor | None) -> Tensor:
        return self.run(triton.attend_latent, self.leaves, split=64, lse_TH=lse_TH)

    def gradients(self, **more: Any) -> list[Tensor]:
        """Of the leaves."""
        found = backward_triton.gradients(
            self.dout, self.q, self.window, self.who, self.out, self.lse_TH, pool=self.pool,
            sinks_H=self.sinks_H, **self.how, **more,
        )  # fmt: skip
        there = (True, True, self.pool is not None, self.sinks_H is not None)
        assert [one is not None for one in found] == list(there)
        return [one for one in found if one is not None]


def compare(case: Case) -> int:
    """Calls that agree with the truth, and with each other."""
    compare_bits(case.forward(None), case.out, "without the sums")
    assert off(case.lse_TH[: case.T], case.truth[1]) < 1e-5
    got, most = case.gradients(), OFF[case.q.dtype]
    case.worst(got, most)
    H, D = case.q.shape[1:]
    each = case.how["picks_TK"]
    each = case.how["most_entries"] if each is None else each.shape[1]
    case.worst(case.gradients(memory=5 * 4 * (each + 128) * (3 * H + D)), most)  # in turns
    return 2


def through_autograd(case: Case) -> int:
    """The Function's values and gradients are the launchers'."""
    leaves = [x.detach().requires_grad_() for x in case.leaves]
    out = case.run(over_flat_rows, leaves)
    got = torch.autograd.grad(out, leaves, case.dout)
    case.lse_TH.fill_(torch.nan)
    case.out = case.run(triton.attend_latent, case.leaves, lse_TH=case.lse_TH)
    compare_bits(out.detach(), case.out, "the Function's output")
    compare_bits(got, case.gradients(), "the Function's gradients")
    return 1


def over_flat_rows(q: Tensor, window: Any, who: Any, *, sinks_H: Any, pool: Any, **how: Any) -> Any:
    values = None if pool is None else pool.values
    return _OverFlatRows.apply(window, pool, who, how, q, window.values, values, sinks_H)


def extremes() -> int:
    """A sink that outweighs all rows leaves nothing, one that weighs nothing changes nothing; a pool without rows."""
    pack = pack_of(CASES[0])
    case = Case(pack, sinks=True)
    without = Case(pack, sinks=False)
    without.dout = case.dout
    case.sinks_H = torch.full((4,), 1e4)
    case.out = case.forward(case.lse_TH)
    for one in case.gradients():
        assert one.eq(0).all()
    case.sinks_H = torch.full((4,), -1e4)
    case.out = case.forward(case.lse_TH)
    got, want = case.gradients(), without.gradients()
    compare_bits(case.gradients(), got, "again")
    assert got.pop().eq(0).all()
    compare_bits(got, want, "a sink of nothing")
    short = Case(
        Pack(World((3, 1), 4, 20, 16, 8, 0, torch.float32), (3, 1), (0, 0), 2, None), sinks=True
    )
    empty = torch.zeros(0, 20)
    found = backward_triton.gradients(
        short.dout, short.q, short.window, short.who, short.out, short.lse_TH,
        pool=triton.Pages.flat(empty, torch.zeros(2)), sinks_H=short.sinks_H, **short.how,
    )  # fmt: skip
    assert found[2] is not None and found[2].shape == empty.shape
    compare_bits(found[:2], short.gradients()[:2], "a pool without rows")
    return 4


def within_rows() -> int:
    """Rows that lie within longer ones: the rest of those has no gradient."""
    case = Case(pack_of(CASES[0]), sinks=True)
    want = case.gradients()
    for name in ("window", "pool"):
        pages = getattr(case, name)
        line = torch.full((len(pages.values), 33), torch.nan)
        line[:, 5:25] = pages.values
        setattr(case, name, triton.Pages.flat(line, pages.table_SK[:, 0], 5))
    got = case.gradients()
    for one in got[1:3]:
        assert one.shape[1] == 33 and one[:, :5].eq(0).all() and one[:, 25:].eq(0).all()
    got[1:3] = [one[:, 5:25] for one in got[1:3]]
    compare_bits(got, want, "within longer rows")
    return 1


def main() -> None:
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # what nobody has written yet is NaN
    interpreter.InterpreterBuilder.create_dot = exact_dot
    calls = extremes() + within_rows()
    for n, case in enumerate(CASES):
        pack = pack_of(case, 70 * (n % 2))
        calls += compare(Case(pack, sinks=n % 3 != 1))
    calls += compare(Case(pack_of(CASES[2]), sinks=True, twice=True))
    for case in CASES[-2:]:
        calls += through_autograd(Case(pack_of(case), sinks=True))
    print(f"{calls} calls agree")


if __name__ == "__main__":
    main()
