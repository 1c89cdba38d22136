"""Gradients of attention over flat rows in Triton's numpy interpreter:
`TRITON_INTERPRET=1 python -m tests.ops.triton_attend_backward_child`.

A process of its own, since Triton decides on import. float32 shows that the formulas are right, whatever the tiles;
bfloat16 that what is rounded is no more than a GPU's products round. The truth is float64 autograd of one softmax for
each token. Bits on a GPU are tests/gpu/test_backward_attend.py's affair.
"""

from dataclasses import replace

import torch
from torch import Tensor
from triton.runtime import interpreter

from tests.ops.attend_pages import Pack, World
from tests.ops.conftest import compare_bits, off
from tests.ops.triton_attend_child import exact_dot
from unified_models.ops.attend import _OverFlatRows, backward_triton, triton
from unified_models.ops.attend.reference import attend as reference

SCALE = 0.3
CASES = [  # query heads, groups, width, keep; dtype
    (8, 2, 16, None, torch.float32),
    (6, 2, 24, 40, torch.float32),
    (5, 1, 16, 5, torch.float32),
    (8, 2, 16, None, torch.bfloat16),
    (6, 2, 24, 40, torch.bfloat16),
]
LENGTHS, PAST = (1, 40, 0, 7, 19, 0), (90, 0, 0, 63, 0, 0)
"""Of sequences; the last is padding."""
TILES = [  # query rows and keys, of the tiles of queries and of keys; parts of a group's heads
    ((16, 16), (16, 16), 1),
    ((32, 16), (64, 32), None),
    ((64, 64), (16, 64), 1),
]
OFF = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
"""Of a gradient's length. The interpreter cuts bfloat16 off where a GPU rounds it."""


class Case:
    """A step over flat rows, whose other memory is NaN, and a gradient of its output."""

    def __init__(self, H: int, G: int, D: int, keep: int | None, dtype: torch.dtype) -> None:
        totals = tuple(p + n for p, n in zip(PAST, LENGTHS, strict=True))
        self.pack = Pack(World(totals, H, G, D, keep, dtype), LENGTHS, PAST, 3, None)
        self.how = {"scale": SCALE, "keep": keep, "groups": G}
        self.q_THD, self.who = self.pack.q_THD, self.pack.who
        self.k, self.v = self.pack.pages
        self.lse_TH = torch.full(self.q_THD.shape[:2], torch.nan)
        self.out = self.forward(self.lse_TH)
        self.dout = torch.randn_like(self.out)
        self.dout[-3:] = torch.nan

    def forward(self, lse_TH: Tensor | None) -> Tensor:
        return triton.attend(
            self.q_THD, self.k, self.v, self.who, most=128, split=64, lse_TH=lse_TH, **self.how
        )

    def gradients(self, **tiles: object) -> tuple[Tensor, ...]:
        return backward_triton.gradients(
            self.dout, self.q_THD, self.k, self.v, self.who, self.out, self.lse_TH,
            **self.how, **tiles,
        )  # fmt: skip

    def truth(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of q and of the rows, and log2 of each head's sum, token by token in float64."""
        w = self.pack.world
        q = self.q_THD[:-3].double().requires_grad_()
        rows = self.k.values.double().nan_to_num().requires_grad_()
        outs, sums = [], []
        for t in range(len(q)):
            p = int(self.who.position_T[t])
            base = int(self.k.table_SK[self.who.sequence_T[t], 0])
            oldest = 0 if w.keep is None else max(0, p - w.keep + 1)
            seen = rows[base + oldest : base + p + 1].unflatten(1, (2, w.G, w.D))
            outs.append(reference(q[t], seen[:, 0], seen[:, 1], scale=SCALE))
            keys = seen[:, 0].repeat_interleave(w.H // w.G, 1)
            sums.append(torch.logsumexp(torch.einsum("hd,nhd->hn", q[t], keys) * SCALE, -1))
        grads = torch.autograd.grad(torch.stack(outs), (q, rows), self.dout[:-3].double())
        return *grads, torch.stack(sums).detach() / torch.log(torch.tensor(2.0))


def compare(case: Case) -> int:
    """Calls that agree with the truth, with each other where nothing differs, and with autograd's way there."""
    calls, dtype = 0, case.q_THD.dtype
    compare_bits(case.forward(None), case.out, "without the sums")
    dq, drows, sums = case.truth()
    assert off(case.lse_TH[:-3], sums) < 1e-5 and bool(case.lse_TH[:-3].isfinite().all())
    for queries, keys, parts in TILES if dtype == torch.float32 else TILES[1:2]:
        tiles = {"query_tile": (*queries, 4, 1), "key_tile": (*keys, 4, 1), "parts": parts}
        got = case.gradients(**tiles)
        for name, one, want in (("q", got[0][:-3], dq), ("rows", got[1], drows)):
            assert one.dtype == dtype and off(one, want) < OFF[dtype], (name, off(one, want))
        assert got[0][-3:].eq(0).all() and got[1][drows.eq(0).all(1)].eq(0).all()
        assert off(got[0][1:-3], dq[:-1]) > 0.5, "a neighbour's gradient is another"
        calls += 1
    compare_bits(case.gradients(**tiles), got, "again")
    apart = replace(case.v, values=case.v.values.clone())
    case.v, kept = apart, case.v
    two = case.gradients(**tiles)
    width = case.pack.world.G * case.pack.world.D
    compare_bits(two[1][:, :width], got[1][:, :width], "keys in a tensor of their own")
    compare_bits(two[2][:, width:], got[1][:, width:], "values in a tensor of their own")
    case.v = kept
    return calls + 2


def through_autograd(case: Case) -> int:
    """The Function's values and gradients are the launchers'."""
    q, rows = case.q_THD.requires_grad_(), case.k.values.detach().requires_grad_()
    k, v = (replace(page, values=rows) for page in (case.k, case.v))
    how = {**case.how, "most": 128}
    out = _OverFlatRows.apply(k, v, case.who, how, q, rows)
    got = torch.autograd.grad(out, (q, rows), case.dout)
    case.lse_TH = torch.full_like(case.lse_TH, torch.nan)
    case.out = triton.attend(
        case.q_THD.detach(), case.k, case.v, case.who, lse_TH=case.lse_TH, **how
    )
    compare_bits(out.detach(), case.out, "the Function's output")
    compare_bits(got, case.gradients(), "the Function's gradients")
    return 1


def tiles_of(lengths: list[int], keys: int) -> int:
    """Over many sequences: every key in one tile, in order."""
    past = torch.tensor([n % 7 for n in lengths])
    starts = torch.tensor([0, *lengths]).cumsum(0)
    nothing = torch.zeros(0)
    who = triton.Sequences(
        nothing, nothing, starts.int(), past.int(), (past + torch.tensor(lengths)).int()
    )
    totals = [p + n if n else 0 for p, n in zip(past.tolist(), lengths, strict=True)]
    tiles = backward_triton.key_tiles(who, sum(totals), keys, 0).tolist()
    want = [[s, n] for s, total in enumerate(totals) for n in range(0, total, keys)]
    assert tiles == want + [[-1, -1]] * (len(tiles) - len(want)) and len(want) > 0
    return 1


def main() -> None:
    torch.manual_seed(0)
    interpreter.InterpreterBuilder.create_dot = exact_dot
    calls = sum(compare(Case(*case)) for case in CASES)
    calls += through_autograd(Case(*CASES[3]))
    calls += tiles_of([0, 1, 16, 17, 0, 40] * 25, 16)
    print(f"{calls} calls agree")


if __name__ == "__main__":
    main()
