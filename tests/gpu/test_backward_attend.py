"""The backward kernels of attend_pages on the device: right by a tolerance at real sizes, and the same in every run."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import compare_bits, nothing_waits, off
from unified_models.ops.attend import _trained, attend_pages
from unified_models.ops.pages import Pages, Sequences

CASES = [  # query heads, groups, width, keep
    (32, 2, 128, None),
    (32, 2, 128, 1000),
    (6, 2, 96, 200),
    (40, 1, 256, None),
    (4, 4, 64, None),
]
LENGTHS = {32: (1, 3000, 8000, 5383), 6: (700, 0, 1, 65), 40: (300, 129), 4: (2000, 1, 64)}
"""Of sequences, by the query heads."""
PADDING = 5
OFF = 1e-2
"""Of a gradient's length: what is multiplied is rounded to bfloat16, the output too, and so is the gradient, each by
0.2% of a value at most."""


@dataclass(frozen=True)
class Training:
    """A pack of whole sequences, keys and values side by side, as the training context has them."""

    lengths: tuple[int, ...]
    H: int
    G: int
    D: int
    keep: int | None

    def make(self, device: str = "cuda") -> tuple[Tensor, Tensor, Sequences, Tensor]:
        """q, rows, who, and a gradient of the output; the tokens of padding are NaN."""
        gen = torch.Generator().manual_seed(0)
        lengths = torch.tensor(self.lengths)
        T, nobody = int(lengths.sum()), torch.full((PADDING,), -1)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        number = torch.arange(len(lengths)).repeat_interleave(lengths)
        position = torch.arange(T) - starts[number]
        told = (
            torch.cat((number, nobody)), torch.cat((position, nobody)), starts,
            torch.zeros_like(lengths), lengths,
        )  # fmt: skip
        who = Sequences(*(x.int().to(device) for x in told))
        q, dout = (torch.randn(T + PADDING, self.H, self.D, generator=gen) for _ in "qd")
        q[T:], dout[T:] = torch.nan, torch.nan
        rows = torch.randn(T, 2 * self.G * self.D, generator=gen)
        q, rows, dout = (x.bfloat16().to(device) for x in (q, rows, dout))
        return q.requires_grad_(), rows.requires_grad_(), who, dout

    def run(self, op: Any, q: Tensor, rows: Tensor, who: Sequences) -> Tensor:
        k = Pages.flat(rows, who.starts_S1[:-1])
        v = replace(k, start=self.G * self.D)
        out: Tensor = op(
            q, k, v, who, scale=self.D**-0.5, keep=self.keep, groups=self.G, most=max(self.lengths)
        )
        return out

    def truth(self, q: Tensor, rows: Tensor, dout: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """dq, dk and dv of each sequence and key head, [n, .., D] in float64, by autograd of one softmax for each query
        head."""
        each, start = self.H // self.G, 0
        for n in filter(None, self.lengths):
            here, start = slice(start, start + n), start + n
            k, v = (x.unflatten(1, (self.G, self.D)) for x in rows[here].detach().chunk(2, 1))
            ahead = torch.arange(n, device=q.device) - torch.arange(n, device=q.device)[:, None]
            hidden = (ahead > 0) | (ahead <= -(self.keep or n))
            for g in range(self.G):
                keys, values = (x[:, g].double().requires_grad_() for x in (k, v))
                dqs, dk, dv = [], torch.zeros_like(keys), torch.zeros_like(values)
                for h in range(g * each, g * each + each):
                    one = q[here, h].detach().double().requires_grad_()
                    scores = (one @ keys.T * self.D**-0.5).masked_fill(hidden, -torch.inf)
                    out = torch.softmax(scores, -1) @ values
                    found = torch.autograd.grad(out, (one, keys, values), dout[here, h].double())
                    dqs.append(found[0])
                    dk, dv = dk + found[1], dv + found[2]
                yield torch.stack(dqs, 1), dk, dv


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_are_those_of_one_softmax(case: tuple) -> None:
    """Each sequence and key head by itself, against float64; again with the same bits; and without a wait."""
    pack = Training(LENGTHS[case[0]], *case)
    q, rows, who, dout = pack.make()
    out = pack.run(attend_pages, q, rows, who)
    with torch.no_grad():
        count = compare_bits(
            out.detach(), pack.run(attend_pages, q, rows, who), "without gradients"
        )
    got = torch.autograd.grad(out, (q, rows), dout, retain_graph=True)
    with nothing_waits():
        again = torch.autograd.grad(out, (q, rows), dout)
    count += compare_bits(again, got, "again")
    print(f"{count} values, none unequal")
    assert got[0][-PADDING:].eq(0).all() and got[0].dtype == got[1].dtype == torch.bfloat16
    dk, dv = (x.unflatten(1, (pack.G, pack.D)) for x in got[1].chunk(2, 1))
    whole, start, each, worst = pack.truth(q, rows, dout), 0, pack.H // pack.G, 0.0
    for n in filter(None, pack.lengths):
        here, start = slice(start, start + n), start + n
        for g in range(pack.G):
            want = next(whole)
            mine = got[0][here, g * each : g * each + each], dk[here, g], dv[here, g]
            for name, a, b in zip(("q", "k", "v"), mine, want, strict=True):
                if (
                    n == 1 and name != "v"
                ):  # one key: nothing to learn, but what the output's rounding leaves
                    assert float(a.abs().max()) < 0.5 and float(b.abs().max()) < 1e-9, name
                    continue
                error = off(a, b)
                worst = max(worst, error)
                assert error < OFF, f"{name} of {n} tokens, group {g}: {error:.2%} off"
                assert n == 1 or off(a[1:], b[:-1]) > 0.5, "a neighbour's gradient is another"
    print(f"{worst:.3%} off at most")


@pytest.mark.parametrize("keep", [None, 100])
def test_gradients_are_those_of_the_lists(keep: int | None) -> None:
    """The torch expressions, over which the gradient went before."""
    pack = Training((1, 150, 0, 333), 32, 2, 128, keep)
    q, rows, who, dout = pack.make()
    found = []
    for op in (attend_pages, _trained):
        out = pack.run(op, q, rows, who)
        found.append(torch.autograd.grad(out[:-PADDING], (q, rows), dout[:-PADDING]))
    for name, got, want in zip(("q", "rows"), *found, strict=True):
        print(f"{name}: {off(got.nan_to_num(), want.nan_to_num()):.3%} off")
        assert off(got[:484], want[:484]) < OFF, name


def test_tiles_change_little() -> None:
    """Other tiles add in another order: gradients off by no more than roundings; each the same in every run."""
    from unified_models.ops.attend import backward_triton, triton

    pack = Training((700, 1, 300), 32, 2, 128, None)
    q, rows, who, dout = pack.make()
    q, rows = q.detach(), rows.detach()
    k = Pages.flat(rows, who.starts_S1[:-1])
    v, lse = replace(k, start=256), torch.full(q.shape[:2], torch.nan, device="cuda")
    how: dict[str, Any] = {"scale": 128**-0.5, "keep": None, "groups": 2}
    out = triton.attend(q, k, v, who, most=700, lse_TH=lse, **how)
    want = backward_triton.gradients(dout, q, k, v, who, out, lse, **how)
    for queries, keys, parts in (
        ((64, 64, 4, 2), (64, 64, 4, 2), 1), ((64, 128, 8, 2), (32, 128, 8, 3), 2),
        ((128, 32, 8, 3), (64, 64, 8, 2), 4),
    ):  # fmt: skip
        tiles: dict[str, Any] = {"query_tile": queries, "key_tile": keys, "parts": parts}
        got, again = (
            backward_triton.gradients(dout, q, k, v, who, out, lse, **how, **tiles)
            for _ in range(2)
        )
        assert compare_bits(again, got, str(tiles)) > 0
        assert max(map(off, got, want)) < 5e-3
