"""A step of latent attention over flat rows with a gradient of its output, and what its gradients are in float64."""

from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tests.ops.conftest import off
from tests.ops.latent_pages import Pack
from unified_models.ops.attend_latent.reference import attend_latent as reference
from unified_models.ops.pages import Pages, Sequences

NAMES = ("q", "window", "pool", "sinks")


class Trained:
    """A flat pack, with sinks or without. twice: every pick stands in its list two times."""

    def __init__(self, pack: Pack, *, sinks: bool, twice: bool = False) -> None:
        assert pack.per_page is None, "gradients go to flat rows"
        told: dict[str, Any] = {}

        def take(q_THD: Tensor, window: Pages, who: Sequences, **how: Any) -> Tensor:
            told.update(how, q=q_THD, window=window, who=who)
            return q_THD

        pack.run(take)
        self.pack, self.T = pack, sum(pack.lengths)
        self.q, self.window, self.who, self.pool = (
            told.pop(name) for name in ("q", "window", "who", "pool")
        )
        self.sinks_H: Tensor | None = told.pop("sinks_H")
        if not sinks:
            self.sinks_H = None
        if twice:
            told["picks_TK"] = told["picks_TK"].repeat_interleave(2, 1)
        self.how = told
        self.dout = torch.randn(self.q.shape).to(self.q)
        self.dout[self.T :] = torch.nan

    @property
    def leaves(self) -> list[Tensor]:
        """Of q, the window's rows, the pool's where there is one, and the sinks where there are any."""
        pool = None if self.pool is None else self.pool.values
        return [x for x in (self.q, self.window.values, pool, self.sinks_H) if x is not None]

    @property
    def names(self) -> list[str]:
        """Of the leaves."""
        both = (True, True, self.pool is not None, self.sinks_H is not None)
        return [name for name, there in zip(NAMES, both, strict=True) if there]

    def run(self, op: Any, leaves: list[Tensor], **more: Any) -> Tensor:
        """op of the step, its tensors being `leaves`."""
        of = dict(zip(self.names, leaves, strict=True))
        out: Tensor = op(
            of["q"], replace(self.window, values=of["window"]), self.who, sinks_H=of.get("sinks"),
            pool=None if self.pool is None else replace(self.pool, values=of["pool"]), **self.how,
            **more,
        )  # fmt: skip
        return out

    def rows_of(self, t: int, window: Tensor, pool: Tensor | None) -> Tensor:
        """What token t reads."""
        s, p = int(self.who.sequence_T[t]), int(self.who.position_T[t])
        base = int(self.window.table_SK[s, 0])
        recent = window[base + max(0, p - self.how["keep"] + 1) : base + p + 1]
        if pool is None:
            return recent
        base, picks = int(self.pool.table_SK[s, 0]), self.how["picks_TK"]
        if picks is None:
            return torch.cat((pool[base : base + int(self.how["count_T"][t])], recent))
        return torch.cat((pool[base + picks[t][picks[t] >= 0]], recent))

    @cached_property
    def truth(self) -> tuple[dict[str, Tensor], Tensor]:
        """By the leaves' names, float64, token by token; and log2 of each head's denominator."""
        leaves = [x.double().nan_to_num().requires_grad_() for x in self.leaves]
        of, outs, sums = dict(zip(self.names, leaves, strict=True)), [], []
        for t in range(self.T):
            rows = self.rows_of(t, of["window"], of.get("pool"))
            how = {"scale": self.how["scale"], "sinks_H": of.get("sinks")}
            outs.append(reference(of["q"][t], rows, **how))
            scores = of["q"][t] @ rows.T * how["scale"]
            if self.sinks_H is not None:
                scores = torch.cat((scores, of["sinks"][:, None]), 1)
            sums.append(torch.logsumexp(scores.detach(), -1))
        grads = torch.autograd.grad(torch.stack(outs), leaves, self.dout[: self.T].double())
        found = dict(zip(self.names, grads, strict=True))
        return found, torch.stack(sums) / torch.log(torch.tensor(2.0))

    def worst(self, got: Any, most: float) -> float:
        """How far the gradients are, at most; AssertionError beyond `most`, or where there is something for padding or
        for rows that nobody reads, or where the check would let other gradients through."""
        worst = 0.0
        for name, one, leaf in zip(self.names, got, self.leaves, strict=True):
            want = self.truth[0][name]
            assert one.dtype == leaf.dtype and one.shape == want.shape, name
            error = off(one, want)
            assert error < most, f"{name}: {error:.2%} off"
            assert one.isfinite().all(), name
            if name in ("window", "pool"):  # rows that nobody reads
                assert one[want.eq(0).all(1)].eq(0).all(), name
            assert off(one.roll(1, 0), want) > 0.5, f"{name}: a neighbour's gradient is another"
            worst = max(worst, error)
        assert got[0][self.T :].eq(0).all()
        return worst
