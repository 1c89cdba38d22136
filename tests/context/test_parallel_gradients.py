"""Gradients over several processes add up to those of one, also where experts, processes or both are idle."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import unified_models as um
from tests.context.test_parallel import ALL, COLUMNS, MODELS, ROWS, sequences
from tests.processes import Partition, group_in, run
from unified_models import verify
from unified_models.context.interface import Experts
from unified_models.context.local import LocalContext
from unified_models.context.parallel import Parallel, ParallelContext
from unified_models.context.step import Step

E = 8
STATIC = {  # FP8 with one scale for the input of each expert
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"backbone.layers.{layer}.mixer.experts.{e}.{name}_proj": {"quant_algo": "FP8"}
        for layer in (1, 4)
        for e in range(E)
        for name in ("up", "down")
    },
}
KINDS = MODELS | {"nemotron_h": {"quantization_config": STATIC}}
PACKS = sequences((70, 1, 0, 33, 2, 140, 17, 5))
Grads = dict[str, Tensor | None]


class Layout(NamedTuple):
    """Which processes share a pack and which the experts. sign: of every routing weight."""

    tokens: Partition = ()
    experts: Partition = ()
    recompute: bool = False
    numerics: str = "float32"
    sign: int = 1

    def packs(self, rank: int, processes: int) -> slice:
        """The sequences of this process's pack."""
        parts = self.tokens or [[r] for r in range(processes)]
        return slice(next(i for i, ranks in enumerate(parts) if rank in ranks), None, len(parts))


def make(name: str, folder: Path) -> Path:
    um.make_tiny(name, folder / name, seed=3, **KINDS[name])
    return folder / name


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp("gradients"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make(name, tmp_path_factory.mktemp("gradients")) for name in KINDS]


def routers(model: Any) -> Iterator[Any]:
    """The modules that route, of any architecture."""
    return (
        module
        for module in model.modules()
        if isinstance(getattr(module, "experts", None), Experts)
    )


def trained(
    model: Any, packs: Sequence[Sequence[int]], **options: Any
) -> tuple[list[Tensor], Grads]:
    """Logprobs, and gradients of a sum in which each has a weight of its own."""
    model.zero_grad()
    lps = um.logprobs(model, packs, 0.9, **options)
    weighted = [(lp * torch.linspace(1, -2, len(lp) + 1)[:-1]).sum() for lp in lps]
    sum(weighted).backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return [lp.detach() for lp in lps], grads


def loaded(folder: Path, layout: Layout, held: tuple[int, int] = (0, 1)) -> Any:
    model = um.load(folder, experts=held, numerics=layout.numerics, progress=False)
    for router in routers(model):
        router.scaling *= layout.sign
    return model


def layouts_job(folder: Path, layouts: dict[str, Layout]) -> dict[str, tuple[list[Tensor], Grads]]:
    """Each layout's logprobs and gradients in this process."""
    needed = {each for layout in layouts.values() for each in (layout.tokens, layout.experts)}
    groups = {each: group_in(each) for each in sorted(needed, key=repr)}
    out = {}
    for name, layout in layouts.items():
        parallel = Parallel(experts=groups[layout.experts], tokens=groups[layout.tokens])
        group = parallel.experts
        held = (dist.get_rank(group), dist.get_world_size(group)) if layout.experts else (0, 1)
        mine = PACKS[layout.packs(dist.get_rank(), dist.get_world_size())]
        model = loaded(folder, layout, held)
        out[name] = trained(model, mine, parallel=parallel, recompute=layout.recompute)
    return out


def added(parts: Sequence[Grads], layout: Layout, name: str) -> Tensor:
    """A parameter's gradient over all processes; experts are stretches of one stack."""
    grads = [part[name] for part in parts]
    assert all(grad is not None for grad in grads), f"{name} has no gradient on some process"
    if ".experts." not in name or not layout.experts:
        return sum(grads[1:], grads[0])
    places = zip(*layout.experts, strict=True)  # processes that hold the same stretch
    return torch.cat([sum((grads[r] for r in ranks[1:]), grads[ranks[0]]) for ranks in places])


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest gradient."""
    return float((got - want).abs().max() / want.abs().max().clamp_min(1e-30))


@pytest.mark.slow(90)
def test_gradients_add_up_F12(folder: Path, tmp_path: Path) -> None:
    """float32 sums in another order: 1e-5 of each parameter's largest; with negative routing weights, too. As deployed,
    gradients are rounded to bf16 on their way, each process its own sum. The control: without one process."""
    layouts = {
        "CP 4": Layout(ALL, (), True),
        "EP 4": Layout((), ALL, False, sign=-1),
        "CP 2 x EP 2": Layout(ROWS, COLUMNS, True),
        "deployed": Layout(ROWS, COLUMNS, False, "deployed"),
    }
    answers = run(layouts_job, 4, tmp_path, folder, layouts, patience=400)
    alone: dict[tuple[str, int], tuple[list[Tensor], Grads]] = {}
    for name, layout in layouts.items():
        kind = (layout.numerics, layout.sign)
        lps, want = alone.setdefault(kind, trained(loaded(folder, layout), PACKS))
        for rank, answer in enumerate(answers):
            found = verify.bits(answer[name][0], lps[layout.packs(rank, 4)])
            assert found.unequal == 0 and found.compared > 10, f"{name}: {found}"
        parts = [answer[name][1] for answer in answers]
        tolerance = 1e-5 if layout.numerics == "float32" else 0.05
        without = []
        for parameter, truth in want.items():
            assert truth is not None
            off = apart(added(parts, layout, parameter), truth)
            assert off <= tolerance, f"{name}: {parameter} is {off} off"
            if ".experts." not in parameter:
                without.append(apart(added(parts[:3], layout, parameter), truth))
        assert sum(off > 10 * tolerance for off in without) > len(without) / 2 > 10, name
    assert verify.bits(alone["float32", 1][0], alone["float32", -1][0]).unequal > 100


def plain_moe(x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """sum_k gates[k] down[ids[k]] max(up[ids[k]] x, 0)^2."""
    hidden = torch.einsum("tkfm,tm->tkf", up[ids], x).clamp_min(0).square()
    return torch.einsum("tk,tkmf,tkf->tm", gates, down[ids], hidden)


def given(rank: int, rows: int) -> tuple[Tensor, ...]:
    """x, ids, gates of both signs and 0, and a cotangent."""
    stream = torch.Generator().manual_seed(rank)
    x, dy = torch.randn(2, rows, 16, generator=stream)
    ids = torch.rand(rows, E, generator=stream).argsort(1)[:, :3]
    gates = torch.randn(rows, 3, generator=stream)
    gates[:, 1] *= (torch.arange(rows) % 3 > 0).float()
    return x, ids, gates, dy


def matrices() -> tuple[Tensor, Tensor]:
    stream = torch.Generator().manual_seed(9)
    return torch.randn(E, 12, 16, generator=stream) / 4, torch.randn(
        E, 16, 12, generator=stream
    ) / 4


def moe_of(
    ctx: LocalContext, rows: tuple[Tensor, ...], first: int, count: int
) -> dict[str, Tensor]:
    """The answers of experts in a context, and every gradient."""
    experts = Experts(E, 16, 12, activation="relu2", format="float32")
    for weight, values in zip((experts.up, experts.down), matrices(), strict=True):
        weight.hold(first, count)
        weight.assign(values[first : first + count])
    x, ids, gates, dy = rows
    x, gates = x.clone().requires_grad_(), gates.clone().requires_grad_()
    y = ctx.moe(x, ids, gates, experts)
    y.backward(dy)
    grads = {"x": x.grad, "gates": gates.grad}
    grads |= {name: getattr(experts, name).master.grad for name in ("up", "down")}
    return grads | {"y": y.detach()}


def moe_job(rows: Sequence[int]) -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    ctx = ParallelContext(Step.of([rows[rank]]), parallel=Parallel(experts=dist.group.WORLD))
    return moe_of(ctx, given(rank, rows[rank]), rank * E // size, E // size)


@pytest.mark.slow(15)
def test_experts_apart_against_float64_F12(tmp_path: Path) -> None:
    """Negative and zero routing weights, one process without tokens: the bits of one process; every gradient against
    float64, which is checked against finite differences. float32 sums of at most 21 terms: 1e-5."""
    counts = (7, 0, 5, 13)
    answers = run(moe_job, 4, tmp_path, counts)
    rows = [torch.cat(parts) for parts in zip(*map(given, range(4), counts), strict=True)]
    alone = moe_of(LocalContext(Step.of([sum(counts)])), tuple(rows), 0, E)
    together = {name: torch.cat([answer[name] for answer in answers]) for name in alone}
    for name in ("y", "x", "gates"):
        found = verify.bits(together[name], alone[name])
        assert found.unequal == 0 and found.compared >= 75, f"{name}: {found}"
    x, ids, gates, dy = rows
    leaves = [t.double().requires_grad_() for t in (x, gates, *matrices())]

    def of(x: Tensor, gates: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return plain_moe(x, ids[: len(x)], gates, up, down)

    few = [t.detach()[:3].requires_grad_() for t in leaves[:2]]
    assert torch.autograd.gradcheck(of, (*few, *leaves[2:]))
    want = dict(
        zip(
            ("x", "gates", "up", "down"),
            torch.autograd.grad(of(*leaves), leaves, dy.double()),
            strict=True,
        )
    )
    for name, truth in want.items():
        assert apart(together[name].double(), truth) < 1e-5, name
    assert bool((rows[2] < 0).any() and (rows[2] == 0).any())


def to_the_first(model: Any) -> None:
    """Route every token to expert 0, and for its other slots to the next ones."""
    for router in routers(model):
        if router.bias is not None:
            router.bias.assign(-100.0 * torch.arange(float(E)))
        else:
            router.tid2eid.data[:] = torch.arange(router.K)


IDLE = {  # the sequences of each of two processes
    "all to the first": (sequences((20, 3)), sequences((9,), 1)),
    "one token": ([[5]], [[]]),
    "two tokens": ([[5, 9]], [[]]),
    "other side": ([[]], [[5, 9, 4]]),
    "no token": ([[]], [[]]),
}
STEPS = 50


def steps_of(rank: int) -> Iterator[list[list[int]]]:
    """Process 1 has tokens in every 20th step."""
    for step in range(STEPS):
        yield sequences((3 + step % 4,), seed=step) if rank == 0 or step % 20 == 7 else [[]]


def idle_job(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """By model: each case of IDLE, and the same with a pack over both processes; of the last, many steps in a row."""
    rank, world, out = dist.get_rank(), dist.group.WORLD, []
    for folder in folders:
        model = um.load(folder, experts=(rank, 2), progress=False)
        whole = um.load(folder, progress=False)
        got: dict[str, Any] = {"steps": []}
        for packs in steps_of(rank) if folder == folders[-1] else ():
            got["steps"] += trained(model, packs, parallel=Parallel(experts=world))[0]
        to_the_first(model)
        to_the_first(whole)
        for i, (name, packs) in enumerate(IDLE.items()):
            again, both = bool(i % 2), [*packs[0], *packs[1]]
            apart_ = Parallel(experts=world)
            got[name] = trained(model, packs[rank], parallel=apart_, recompute=again)
            shared = Parallel(tokens=world)
            got[f"{name}, shared"] = trained(whole, both, parallel=shared, recompute=again)
        out.append(got)
    return out


def check_idle(parts: Sequence[Any], layout: Layout, want: Any, used: int) -> None:
    """Two processes' logprobs and gradients against one's; `used` experts had all the rows."""
    lps, grads = want
    got = [*parts[0][0], *parts[1][0]] if layout.experts else parts[1][0]
    found = verify.bits(got, lps)
    assert (found.unequal, found.compared) == (0, sum(map(len, lps))), f"{found}"
    for parameter, truth in grads.items():
        total = added([part[1] for part in parts], layout, parameter)
        assert total.isfinite().all(), parameter
        assert apart(total, truth) < 0.05 if bool(truth.any()) else not total.any(), parameter
        if ".experts." in parameter:
            assert not total[used:].any(), f"{parameter}: idle experts"
            assert bool(total[:used].any()) == bool(found.compared), parameter


@pytest.mark.slow(60)
def test_idle_experts_and_processes_F10_B17(folders: list[Path], tmp_path: Path) -> None:
    """All tokens go to experts of process 0; one token in all, or none; 50 steps, most without tokens on process 1:
    nobody waits for ever, and who had nothing to do has gradients of 0."""
    answers = run(idle_job, 2, tmp_path, folders)
    for place, folder in enumerate(folders):
        model = um.load(folder)
        for rank, answer in enumerate(answers if folder == folders[-1] else ()):
            with torch.no_grad():
                want = um.logprobs(model, [pack for packs in steps_of(rank) for pack in packs], 0.9)
            found = verify.bits(answer[place]["steps"], want)
            assert found.unequal == 0 and found.compared > 5 and len(want) == STEPS
        to_the_first(model)
        used = model.config.num_experts_per_tok
        assert used < E // 2, "process 1 has no rows"
        for name, packs in IDLE.items():
            both = [*packs[0], *packs[1]]
            zeros = {n: torch.zeros_like(p) for n, p in model.named_parameters() if p.requires_grad}
            alone = trained(model, both) if any(both) else (um.logprobs(model, both), zeros)
            parts = [answer[place] for answer in answers]
            check_idle([p[name] for p in parts], Layout((), ROWS[:1]), alone, used)
            check_idle([p[f"{name}, shared"] for p in parts], Layout(ROWS[:1]), alone, used)


def tied(model: Any) -> None:
    """Experts e and e + 4, one on each process, are alike to the router."""
    for router in routers(model):
        for weight in (router.gate, router.bias):
            if weight is not None:
                half = weight.master.detach()[: E // 2]
                weight.assign(torch.cat((half, half)))


SAME = ([[7] * 40, [7] * 3], [[7] * 17])


class Routes(ParallelContext):
    """Remembers what every router was given and chose, each time that it runs."""

    chosen: list[tuple[Tensor, Tensor]]

    def choose(self, scores_TE: Tensor, k: int, site: Any) -> Tensor:
        ids_TK: Tensor = super().choose(scores_TE, k, site)
        self.chosen.append((scores_TE.detach(), ids_TK))
        return ids_TK


def ties_job(folders: Sequence[Path]) -> list[list[Any]]:
    """By model, without and with recomputation: logprobs, gradients, notes and choices of the forward and of the
    backward."""
    rank, out = dist.get_rank(), []
    for folder in folders:
        model = um.load(folder, experts=(rank, 2), progress=False)
        tied(model)
        out.append([noted(model, SAME[rank], recompute) for recompute in (False, True)])
    return out


def noted(model: Any, packs: Sequence[Sequence[int]], recompute: bool) -> tuple[Any, ...]:
    seen: list[tuple[str, Any]] = []
    Routes.chosen = chosen = []
    context = partial(Routes, onlooker=lambda site, name, value: seen.append((name, value)))
    model.zero_grad()
    parallel = Parallel(experts=dist.group.WORLD)
    lps = torch.cat(
        um.logprobs(model, packs, recompute=recompute, parallel=parallel, context=context)
    )
    forward = seen[:], chosen[:]
    lps.sum().backward()
    grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    backward = seen[len(forward[0]) :], chosen[len(forward[1]) :]
    return lps.detach(), grads, forward, backward


@pytest.mark.slow(30)
def test_ties_take_the_same_way_again_F09(folders: list[Path], tmp_path: Path) -> None:
    """One token id everywhere and a router with two of everything: a recomputed block routes as it did, gradients are
    the same bits, and each router's rows are noted once, in the forward."""
    answers = run(ties_job, 2, tmp_path, folders)
    for place, folder in enumerate(folders):
        model = um.load(folder)
        tied(model)
        count, k = len(list(routers(model))), model.config.num_experts_per_tok
        for rank, answer in enumerate(answers):
            (lps, grads, forward, backward), (lps2, grads2, forward2, backward2) = answer[place]
            with torch.no_grad():
                want = torch.cat(um.logprobs(model, SAME[rank]))
            for got in (lps, lps2):
                assert verify.bits(got, want).unequal == 0 and len(got) > 15
            found = verify.bits(list(grads.values()), list(grads2.values()))
            assert found.unequal == 0 and found.compared > 10_000, f"{found}"
            assert any(bool(grad.any()) for name, grad in grads.items() if ".experts." in name)
            for notes, _ in (forward, forward2):
                rows = [value for name, value in notes if name == "expert_rows"]
                assert len(rows) == count
                assert {int(counts.sum()) for counts in rows} == {k * sum(map(len, SAME[rank]))}
            choices, again = forward2[1], backward2[1]
            assert not backward[0] and not backward2[0] and not backward[1]
            assert len(again) == len(choices) > 0
            for (scores, ids), (scores2, ids2) in zip(choices, reversed(again), strict=True):
                assert torch.equal(ids, ids2) and verify.bits(scores, scores2).unequal == 0
                assert torch.equal(scores[:, : E // 2], scores[:, E // 2 :]), "no ties"
