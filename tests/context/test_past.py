"""Attention, convolution and scan through LocalContext: any split of any sequences has the bits of each sequence whole.

The memory is one of this file's: it keeps what records give back, and NaN wherever a step may not look.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unified_models.context import BFLOAT16_RECORD, Experts, Rows, State, StaticFP8, Weight
from unified_models.context.local import LocalContext
from unified_models.context.memory import Readable, closed
from unified_models.context.plain import PlainContext
from unified_models.context.slots import slots
from unified_models.context.step import Step

H, P, G, N, Q, C, D = 8, 16, 2, 32, 16, 24, 32
INTEGERS = {2: torch.int16, 4: torch.int32}


@dataclass
class Notebook:
    """Everything that each sequence of a step wrote, row by row. names: the sequences of the next step."""

    names: list[int] = field(default_factory=list)
    kept: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    last: dict[tuple[str, int], Tensor] = field(default_factory=dict)

    def rows(
        self, step: Step, slot: Rows, new_TD: Tensor, scales_D: Tensor | None = None
    ) -> Readable:
        written = slot.record.decode(
            slot.record.encode(new_TD, scales_D), new_TD.shape[1], scales_D
        )
        out, base, at = [], [], 0
        for s, name in enumerate(self.names):
            key, new = (slot.path, name), written[step.starts_S[s] : step.starts_S[s + 1]]
            before = self.kept.get(key, new[:0])
            assert len(before) == step.past[s]
            self.kept[key] = torch.cat((before, new))
            first = 0 if slot.keep is None else max(0, step.past[s] - slot.keep + 1)
            nothing = new.new_full((random.randint(1, 4), new.shape[1]), torch.nan)
            out += [nothing, self.kept[key][first:]]
            base.append(at + len(nothing) - first)
            at += len(nothing) + len(out[-1])
        out.append(written.new_full((1, written.shape[1]), torch.nan))
        return Readable(torch.cat(out), torch.tensor(base, dtype=torch.int64))

    def entries(self, step: Step, slot: Any, new_UD: Tensor) -> Readable:
        raise AssertionError("nothing here compresses")

    def states(self, step: Step, slot: State) -> Tensor:
        zero = torch.zeros(slot.shape)
        return torch.stack([self.last.get((slot.path, name), zero) for name in self.names])

    def keep_states(self, step: Step, slot: State, new_UHPN: Tensor) -> None:
        _, counts_S = closed(step, slot)
        assert len(new_UHPN) == int(counts_S.sum())
        for name, states in zip(self.names, new_UHPN.split(counts_S.tolist()), strict=True):
            if len(states):
                self.last[slot.path, name] = states[-1]


class Site(nn.Module):
    """One of each: a convolution, a scan, and attention over rows in bfloat16, in static FP8, and in a window."""

    def __init__(self) -> None:
        super().__init__()
        self.taps = Weight(None, C, None, 1, None, 4)
        self.bias = Weight(None, C)
        self.k_scale = Weight(format="float32", frozen=True)
        self.v_scale = Weight(format="float32", frozen=True)
        for weight in (self.taps, self.bias):
            weight.assign(torch.randn(weight.shape))
        self.k_scale.assign(torch.tensor(0.01))
        self.v_scale.assign(torch.tensor(0.013))
        self.recent = Rows(C, keep=4, record=BFLOAT16_RECORD)
        self.state = State((H, P, N), groups=G, chunk=Q, record=BFLOAT16_RECORD)
        self.plain = Rows(2 * G * D, record=BFLOAT16_RECORD)
        self.fp8 = Rows(2 * G * D, record=StaticFP8())
        self.window = Rows(2 * G * D, keep=20, record=BFLOAT16_RECORD)
        self.a_H, self.skip_H = -torch.exp(torch.randn(H)), torch.randn(H)
        slots(self)

    def attend(self, ctx: LocalContext, part: dict[str, Tensor], slot: Rows) -> Tensor:
        scales = (self.k_scale, self.v_scale) if slot is self.fp8 else None
        q, k, v = part["q"], part["k"], part["v"]
        return ctx.attend(q, k, v, slot, scale=D**-0.5, scales=scales)

    def conv(self, ctx: LocalContext, part: dict[str, Tensor]) -> Tensor:
        return ctx.conv(part["xbc"], self.taps, self.bias, self.recent)

    def scan(self, ctx: LocalContext, part: dict[str, Tensor]) -> Tensor:
        rows = (part[name] for name in ("x", "dt", "b", "c"))
        return ctx.scan(*rows, self.state, a_H=self.a_H, skip_H=self.skip_H)


USES: dict[str, Callable[[Site, LocalContext, dict[str, Tensor]], Tensor]] = {
    "conv": Site.conv,
    "scan": Site.scan,
    "attend": lambda site, ctx, part: site.attend(ctx, part, site.plain),
    "attend-fp8": lambda site, ctx, part: site.attend(ctx, part, site.fp8),
    "attend-window": lambda site, ctx, part: site.attend(ctx, part, site.window),
}


def inputs(T: int) -> dict[str, Tensor]:
    made = {
        "xbc": torch.randn(T, C),
        "x": torch.randn(T, H, P),
        "b": torch.randn(T, G, N),
        "c": torch.randn(T, G, N) / 4,
        "q": torch.randn(T, 4, D),
        "k": torch.randn(T, G, D),
        "v": torch.randn(T, G, D),
    }
    return {k: v.bfloat16() for k, v in made.items()} | {"dt": 0.2 * torch.rand(T, H)}


def steps(use: Callable, site: Site, docs: list[dict[str, Tensor]], plan: list[list[int]]) -> Any:
    """Each document's output when step i brings plan[i][s] tokens of document s; documents with 0 may be absent."""
    memory, done, outs = Notebook(), [0] * len(docs), [[] for _ in docs]
    for counts in plan:
        memory.names = [s for s, n in enumerate(counts) if n or random.random() < 0.5]
        random.shuffle(memory.names)
        lengths = [counts[s] for s in memory.names]
        part = {
            name: torch.cat([docs[s][name][done[s] : done[s] + counts[s]] for s in memory.names])
            for name in docs[0]
        }
        step = Step.of(lengths, [done[s] for s in memory.names])
        y = use(site, LocalContext(step, memory), part)
        for s, rows in zip(memory.names, y.split(lengths), strict=True):
            outs[s].append(rows)
            done[s] += counts[s]
    assert done == [len(doc["x"]) for doc in docs]
    return [torch.cat(rows) for rows in outs]


def differ(a: Tensor, b: Tensor) -> int:
    """Values with other bits."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    integer = INTEGERS[a.element_size()]
    return int((a.contiguous().view(integer) != b.contiguous().view(integer)).sum())


def random_plan(lengths: list[int]) -> list[list[int]]:
    """Random steps of a few tokens for some documents, decode and chunks mixed, until all are through."""
    left, plan = list(lengths), []
    while any(left):
        counts = [min(n, random.choice([0, 1, 1, 2, 7, 16, 33])) for n in left]
        if any(counts):
            plan.append(counts)
            left = [n - c for n, c in zip(left, counts, strict=True)]
    return plan


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_split_is_each_sequence_whole_F01(use: Callable, threads: int) -> None:
    """Training's pack, each document alone, row by row, and random mixes of prefill and decode."""
    site, lengths = Site(), [1, 3, 17, 70, 33]
    docs = [inputs(n) for n in lengths]
    whole = [
        use(site, LocalContext(Step.of([n])), doc) for n, doc in zip(lengths, docs, strict=True)
    ]
    packed = {name: torch.cat([doc[name] for doc in docs]) for name in docs[0]}
    pack = use(site, LocalContext(Step.of(lengths)), packed).split(lengths)
    assert sum(differ(a, b) for a, b in zip(pack, whole, strict=True)) == 0
    rows = [[int(t < n) for n in lengths] for t in range(max(lengths))]
    compared = 0
    for plan in (rows, *(random_plan(lengths) for _ in range(4))):
        got = steps(use, site, docs, plan)
        assert sum(differ(a, b) for a, b in zip(got, whole, strict=True)) == 0, plan
        compared += sum(t.numel() for t in got)
    assert compared == 5 * sum(t.numel() for t in whole) > 0
    got[3][-1].view(INTEGERS[got[3].element_size()]).view(-1)[0] ^= 1
    assert differ(got[3], whole[3]) == 1


@torch.no_grad()
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_plain_is_close_and_has_other_bits(use: Callable) -> None:
    """The baseline, whole and one token at a time: the same function in other bits. In float32, since bfloat16 rounds
    most differences away; records still round what they keep."""
    site, doc = Site(), {name: value.float() for name, value in inputs(90).items()}
    want = use(site, LocalContext(Step.of([90])), doc)
    whole = use(site, PlainContext(Step.of([90])), doc)
    memory, rows = Notebook([0]), []
    for t in range(90):
        part = {name: value[t : t + 1] for name, value in doc.items()}
        rows.append(use(site, PlainContext(Step.of([1], [t]), memory), part))
    bound = 1e-5 * float(want.abs().max())
    for got in (whole, torch.cat(rows)):
        assert got.dtype == want.dtype
        assert float((got.float() - want.float()).abs().max()) < bound
        # Products of bfloat16 are exact in float32, and torch's convolution adds the four in our order here.
        # Whole chunks of one tile are the products of the exact scan; single rows, by the recurrence, are not.
        alike = use is Site.conv or (use is Site.scan and got is whole)
        assert alike or differ(got, want) > 0


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_plain_gradients(use: Callable) -> None:
    """bfloat16 products against float32 ones: 3 in 100 of each gradient's norm."""
    site, doc = Site(), inputs(50)
    names = {"conv": ["xbc"], "scan": ["x", "dt", "b", "c"]}
    key = next(name for name, known in USES.items() if known is use)
    leaves = {name: doc[name].clone().requires_grad_() for name in names.get(key, ["q", "k", "v"])}
    grads = []
    for context in (LocalContext, PlainContext):
        y = use(site, context(Step.of([50])), doc | leaves)
        cotangent = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype)
        grads.append(torch.autograd.grad(y, list(leaves.values()), cotangent))
    for name, exact, plain in zip(leaves, *grads, strict=True):
        assert float(exact.norm()) > 0
        assert float((plain - exact).float().norm()) < 0.03 * float(exact.float().norm()), name


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0, 0)], ids=str)
@pytest.mark.parametrize("context", [LocalContext, PlainContext], ids=lambda c: c.__name__)
def test_empty_documents_F02(context: type[LocalContext], lengths: tuple[int, ...]) -> None:
    """Their output is empty and their state stays what it was, beside others and alone."""
    site, memory = Site(), Notebook(list(range(len(lengths))))
    before = {("state", s): torch.randn(H, P, N) for s in memory.names}
    memory.last = dict(before)
    part, step = inputs(sum(lengths)), Step.of(lengths)
    for use in USES.values():
        y = use(site, context(step, memory), part)
        assert len(y) == sum(lengths)
        assert bool(y.isfinite().all())
    assert memory.last == before
    if sum(lengths):
        memory.names = [lengths.index(5)]
        memory.kept = {}
        alone = site.scan(context(Step.of([5]), memory), part)
        memory.names, memory.kept = list(range(len(lengths))), {}
        assert differ(site.scan(context(step, memory), part), alone) == 0


def test_relu2_experts_plain_and_gradient() -> None:
    """Experts without a gate: down(max(up x, 0)^2), weighed and added in float32; the baseline is close, in other
    bits."""
    experts = Experts(6, 256, 384, activation="relu2")
    assert experts.gate is None
    for weight in (experts.up, experts.down):
        weight.assign(torch.randn(weight.shape) / 16)
    x = torch.randn(40, 256).bfloat16().requires_grad_()
    ids = torch.stack([torch.randperm(6)[:3] for _ in range(40)])
    gates = torch.rand(40, 3).requires_grad_()
    wide = x.detach().double().requires_grad_()
    up, down = (w().value.detach().double() for w in (experts.up, experts.down))
    h = torch.einsum("tm,tkfm->tkf", wide, up[ids]).clamp(min=0) ** 2
    weighed = gates.detach().double()[..., None] * torch.einsum("tkf,tkmf->tkm", h, down[ids])
    want, dy = weighed.sum(1), torch.randn(40, 256)
    (truth,) = torch.autograd.grad(want, wide, dy.double())
    outs, exact = [], Experts(6, 256, 384, activation="relu2", format="float32")
    for mine, theirs in ((exact.up, experts.up), (exact.down, experts.down)):
        mine.assign(theirs.master.detach())
    for context in (LocalContext, PlainContext):
        y = context(Step.of([40])).moe(x, ids, gates, experts)
        outs.append(context(Step.of([40])).moe(x.detach().float(), ids, gates.detach(), exact))
        assert float((y.detach() - want.detach()).norm()) < 0.01 * float(want.detach().norm())
        (grad,) = torch.autograd.grad(y, x, dy.bfloat16())
        assert float((grad - truth).norm()) < 0.02 * float(truth.norm())
    assert differ(*outs) > 0
