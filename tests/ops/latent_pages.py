"""Sequences, and steps of them over pages whose other memory is NaN, for the tests of attend_latent_pages on either
device."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tests.ops.attend_pages import Step
from tests.ops.conftest import compare_bits
from unified_models.formats.records import LatentFP8
from unified_models.ops.pages import Pages

STALE = 1 << 20
"""What a table says where a sequence has no row: whoever goes there leaves memory."""


@dataclass(frozen=True)
class World:
    """Sequences of `totals` tokens: H heads over rows of width D, the last `keep` seen, and an entry for every
    `stride` tokens (0: no pool), of which a token picks `picks` (0: it reads all). rope: of records of rows, 0 for
    plain ones."""

    totals: tuple[int, ...]
    H: int
    D: int
    keep: int
    stride: int
    picks: int
    dtype: torch.dtype
    rope: int = 0

    @cached_property
    def record(self) -> LatentFP8 | None:
        return LatentFP8(self.rope) if self.rope else None

    @cached_property
    def sinks_H(self) -> Tensor:
        return torch.randn(self.H)

    @cached_property
    def tokens(self) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Of each sequence: q [n, H, D], rows [n, D] and entries [n // stride, D] as they are read, picks [n, K]."""
        out = []
        for n in self.totals:
            entries = n // self.stride if self.stride else 0
            q = torch.randn(n, self.H, self.D).to(self.dtype)
            rows, pool = (torch.randn(m, self.D).to(self.dtype) for m in (n, entries))
            if self.record is not None:
                rows, pool = (
                    self.record.decode(self.record.encode(x), self.D) for x in (rows, pool)
                )
            picks = torch.full((n, max(1, self.picks)), -1)
            for t in range(n if self.stride else 0):
                seen = torch.randperm((t + 1) // self.stride)[: self.picks].sort(descending=True)[0]
                picks[t, : len(seen)] = seen
            out.append((q, rows, pool, picks))
        return out


@dataclass(frozen=True)
class Pack(Step):
    """A step: sequence s of the world brings lengths[s] tokens after past[s]; then `padding` tokens of nobody.

    per_page: None for a pack's flat plain rows. more: entries that are allowed for beyond the most that there are; or
    picks of nothing behind the others. ring: of the window's pages.
    """

    world: World
    lengths: tuple[int, ...]
    past: tuple[int, ...]
    padding: int = 0
    per_page: int | None = 16
    more: int = 0
    ring: int = 0
    device: str = "cpu"

    def new(self, which: int, nobody: float) -> Tensor:
        """The step's part of the world's q (0) or picks (3); `nobody` for padding."""
        parts = [
            tokens[which][p : p + n]
            for tokens, p, n in zip(self.world.tokens, self.past, self.lengths, strict=True)
        ]
        padding = torch.full((self.padding, *parts[0].shape[1:]), nobody, dtype=parts[0].dtype)
        return torch.cat((*parts, padding)).to(self.device)

    def _pages(self, which: int, seen: list[Tensor], ring: int) -> Pages:
        """Of the world's rows (1) or entries (2), NaN but for those `seen`."""
        w = self.world
        record = None if self.per_page is None else w.record
        width, most = (record.size(w.D) if record else w.D), max(1, *self.totals)
        per_page = self.per_page or most
        each = -(-most // per_page)
        places = torch.randperm(2 * each * len(seen))
        table = torch.full((len(seen), each), STALE, dtype=torch.int32)
        gap, start = (0, 0) if self.per_page is None else (48, 16)
        if record:
            line = torch.full((len(places), per_page * width + gap), 255, dtype=torch.uint8)
        else:
            line = torch.full((len(places), per_page * width + gap), torch.nan, dtype=w.dtype)
        rows = line[:, start : start + per_page * width].unflatten(1, (per_page, width))
        for s, n in enumerate(seen):
            values = w.tokens[s][which][n]
            table[s, n // per_page] = places[s * each + n // per_page].int()
            at = table[s, n // per_page].long(), n % per_page % (ring or per_page)
            rows[at] = record.encode(values) if record else values
        line, table = line.to(self.device), table.to(self.device)
        if self.per_page is None:
            return Pages.flat(line.view(-1, width), table[:, 0] * per_page)
        found = Pages(line, table, per_page, line.shape[1], width, start)
        return replace(found, ring=ring) if ring else found

    @cached_property
    def pages(self) -> tuple[Pages, Pages | None]:
        """The window's and the pool's."""
        w, window, pool = self.world, [], []
        for s, (past, total) in enumerate(zip(self.past, self.totals, strict=True)):
            there = self.lengths[s] > 0
            oldest = max(0, past - w.keep + 1)
            window.append(torch.arange(oldest, total if there else oldest))
            picks = w.tokens[s][3][past:total].unique()
            all_of_them = torch.arange(total // w.stride if there and w.stride else 0)
            pool.append(picks[picks >= 0] if w.picks else all_of_them)
        return self._pages(1, window, self.ring), self._pages(2, pool, 0) if w.stride else None

    def run(self, op: Callable[..., Tensor], **how: Any) -> Tensor:
        """What `op` makes of the step; `how` besides what the world says."""
        w, (window, pool) = self.world, self.pages
        count_T = picks_TK = None
        if pool is not None and w.picks:
            nothing = torch.full((1, self.more), -1, device=self.device)
            picks_TK = self.new(3, 77)
            picks_TK = torch.cat((picks_TK, nothing.expand(len(picks_TK), -1)), 1)
        elif pool is not None:
            count_T = (self.who.position_T + 1) // w.stride
        return op(
            self.new(0, torch.nan), window, self.who,
            scale=w.D**-0.5, keep=w.keep, sinks_H=w.sinks_H.to(self.device), pool=pool,
            count_T=count_T, picks_TK=picks_TK,
            most_entries=max(self.totals) // w.stride + self.more if w.stride else 0, **how,
        )  # fmt: skip

    def told(self) -> dict[str, Any]:
        """What the op is told of its rows."""
        record = self.world.rope if self.per_page is not None else 0
        return {"record": "latent_fp8", "rope": record} if record else {}


def plain(pack: Pack) -> Tensor:
    """The step's tokens as one softmax each, in float64 on the CPU: [T, H, D] without padding."""
    w, outs = pack.world, []
    for (q, rows, pool, picks), past, total in zip(w.tokens, pack.past, pack.totals, strict=True):
        for t in range(past, total):
            entries = picks[t][picks[t] >= 0] if w.picks else slice((t + 1) // (w.stride or t + 2))
            seen = torch.cat((pool[entries], rows[max(0, t - w.keep + 1) : t + 1])).double()
            scores = q[t].double() @ seen.T * w.D**-0.5
            p = torch.softmax(torch.cat((scores, w.sinks_H.double()[:, None]), 1), -1)
            outs.append(p[:, :-1] @ seen)
    return torch.stack(outs)


def compare_steps(run: Callable[[Pack], Tensor], pack: Pack, whole: Tensor) -> int:
    """Tokens of each sequence as they are decoded, one alone, against the same in the step: how many values agree."""
    count, start = 0, 0
    for s, length in enumerate(pack.lengths):
        for t in sorted({0, 1, length // 2, length - 1} & set(range(length))):
            lengths = [0] * len(pack.lengths)
            lengths[s] = 1
            before = tuple(p + (t if i == s else 0) for i, p in enumerate(pack.past))
            alone = replace(pack, lengths=tuple(lengths), past=before, padding=1)
            count += compare_bits(run(alone)[:1], whole[start + t][None], f"token {t} of {s} alone")
        start += length
    return count
