"""Sequences, and steps of them over pages whose other memory is NaN, for the tests of attend_pages on either device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tests.ops.conftest import compare_bits
from unified_models.ops.attend.listed import dequantized
from unified_models.ops.pages import Pages, Sequences

STALE = 1 << 20
"""What a table says where a sequence has no row: whoever goes there leaves memory."""


@dataclass(frozen=True)
class World:
    """Sequences of `totals` tokens: H query heads over G key heads of width D, the last `keep` tokens seen."""

    totals: tuple[int, ...]
    H: int
    G: int
    D: int
    keep: int | None
    dtype: torch.dtype
    codes: torch.dtype | None = None

    @cached_property
    def tokens(self) -> list[tuple[Tensor, Tensor]]:
        """Of each sequence: q [n, H, D], and rows [n, 2 G D], of k and then of v."""
        out = []
        for n in self.totals:
            rows = torch.randn(n, 2 * self.G * self.D)
            if self.codes is not None:
                rows = rows.to(torch.float8_e4m3fn).view(self.codes)
            else:
                rows = rows.to(self.dtype)
            out.append((torch.randn(n, self.H, self.D).to(self.dtype), rows))
        return out


class Step:
    """Who is in a step, of its lengths, past and padding: what a pack of either attention is."""

    lengths: tuple[int, ...]
    past: tuple[int, ...]
    padding: int
    device: str

    @property
    def totals(self) -> list[int]:
        """Tokens of each sequence after the step."""
        return [past + length for past, length in zip(self.past, self.lengths, strict=True)]

    @cached_property
    def who(self) -> Sequences:
        lengths, past = torch.tensor(self.lengths), torch.tensor(self.past)
        number = torch.arange(len(lengths)).repeat_interleave(lengths)
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
        position = torch.arange(len(number)) + (past - starts[:-1])[number]
        nobody = torch.full((self.padding,), -1)
        told = (
            torch.cat((number, nobody)),
            torch.cat((position, nobody)),
            starts,
            past,
            past + lengths,
        )
        return Sequences(*(x.int().to(self.device) for x in told))


@dataclass(frozen=True)
class Pack(Step):
    """A step: sequence s of the world brings lengths[s] tokens after past[s]; then `padding` tokens of nobody.

    per_page: None for a pack's flat rows. most: the bound that the step is given, at least its longest sequence.
    """

    world: World
    lengths: tuple[int, ...]
    past: tuple[int, ...]
    padding: int = 0
    per_page: int | None = 16
    most: int = 0
    device: str = "cpu"

    @property
    def q_THD(self) -> Tensor:
        """NaN for padding."""
        w = self.world
        new = [q[p : p + n] for (q, _), p, n in zip(w.tokens, self.past, self.lengths, strict=True)]
        nobody = torch.full((self.padding, w.H, w.D), torch.nan, dtype=w.dtype)
        return torch.cat((*new, nobody)).to(self.device)

    @cached_property
    def pages(self) -> tuple[Pages, Pages]:
        """Of k and of v, in one tensor of rows, which are NaN where no token of the step may read."""
        w, width = self.world, self.world.G * self.world.D
        per_page = self.per_page or max(1, *self.totals)
        each = -(-max(1, *self.totals) // per_page)
        places = torch.randperm(2 * each * len(self.totals))
        table = torch.full((len(self.totals), each), STALE, dtype=torch.int32)
        rows = torch.full((len(places), per_page, 2 * width), torch.nan)
        rows = rows.to(torch.float8_e4m3fn if w.codes else w.dtype)
        values = rows.view(w.codes) if w.codes else rows
        for s in filter(self.lengths.__getitem__, range(len(self.totals))):
            oldest = 0 if w.keep is None else max(0, self.past[s] - w.keep + 1)
            p = torch.arange(oldest, self.totals[s])
            table[s, p // per_page] = places[s * each + p // per_page].int()
            values[table[s, p // per_page], p % per_page] = w.tokens[s][1][p]
        values, table = values.to(self.device), table.to(self.device)
        if self.per_page is None:
            base_S, flat = table[:, 0] * per_page, values.flatten(0, 1)
            return Pages.flat(flat, base_S), Pages.flat(flat, base_S, width)
        k = Pages(values, table, per_page, per_page * 2 * width, 2 * width)
        return k, replace(k, start=width)

    def run(self, op: Callable[..., Tensor], **how: Any) -> Tensor:
        """What `op` makes of the step; `how` besides what the world says."""
        w = self.world
        scales = tuple(torch.tensor(x, device=self.device) for x in (0.7, 1.3)) if w.codes else None
        return op(
            self.q_THD, *self.pages, self.who,
            scale=w.D**-0.5, keep=w.keep, groups=w.G, most=max(self.most, *self.totals),
            scales=scales, **how,
        )  # fmt: skip


def plain(pack: Pack) -> Tensor:
    """The step's tokens as one softmax each, in float64 on its device: [T, H, D] without padding."""
    w, outs = pack.world, []
    for (q, rows), past, n in zip(w.tokens, pack.past, pack.lengths, strict=True):
        q, rows = q[past : past + n].to(pack.device).double(), rows[: past + n].to(pack.device)
        k, v = (x.unflatten(1, (w.G, w.D)) for x in rows.chunk(2, 1))
        if w.codes:
            k, v = (dequantized(x, s, w.dtype) for x, s in zip((k, v), (0.7, 1.3), strict=True))
        k, v = (x.double().repeat_interleave(w.H // w.G, 1) for x in (k, v))
        ahead = torch.arange(len(rows)) - torch.arange(past, past + n)[:, None]
        hidden = (ahead > 0) | (ahead <= -(w.keep or 1 << 30))
        scores = torch.einsum("thd,nhd->htn", q, k) * w.D**-0.5
        p = torch.softmax(scores.masked_fill(hidden.to(pack.device), -torch.inf), -1)
        outs.append(torch.einsum("htn,nhd->thd", p, v))
    return torch.cat(outs)


def same(got: Tensor, want: Tensor, where: str) -> int:
    """The number of values compared, all equal."""
    return compare_bits(got, want, where)


def compare_steps(op: Callable[..., Tensor], pack: Pack, whole: Tensor) -> int:
    """Tokens of each sequence as they are decoded, one alone, against the same in the step: how many values agree."""
    count, start = 0, 0
    for s, (length, past) in enumerate(zip(pack.lengths, pack.past, strict=True)):
        for t in sorted({0, 1, length // 2, length - 1} & set(range(length))):
            lengths = tuple(int(n == s) for n in range(len(pack.lengths)))
            pasts = tuple(past + t if n == s else 0 for n in range(len(pack.lengths)))
            alone = replace(pack, lengths=lengths, past=pasts, padding=0).run(op)
            count += same(alone, whole[start + t][None], f"token {t} of sequence {s} alone")
        start += length
    return count
