"""FSDP2 over gloo processes: the bits of one process, masters after some steps, saving, resuming, exporting."""

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import unified_models as um
from tests.processes import run
from unified_models.adapters import fsdp
from unified_models.context.parallel import Parallel
from unified_models.model import LanguageModel

TINY = Path(__file__).parents[3] / "configs/tiny"
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {},
    "nemotron_h": {"config": TINY / "nemotron_h_mixed.json"},
}
LENGTHS = (130, 1, 65, 17, 2, 40)
TOKENS = sum(LENGTHS) - len(LENGTHS)


def sequences() -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(512) for _ in range(n)] for n in LENGTHS]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("fsdp") / request.param
    um.make_tiny(request.param, path, seed=3, **MODELS[request.param])
    return path


def trained(
    model: LanguageModel, mine: list[list[int]], steps: int, **how: Any
) -> tuple[list[list[Tensor]], torch.optim.Optimizer]:
    """The logprobs of each step; SGD, so that a difference in a gradient stays one of its size."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.commit_after(optimizer)
    seen = []
    for _ in range(steps):
        lps = um.logprobs(model, mine, **how)
        seen.append([lp.detach() for lp in lps])
        (-torch.cat(lps).sum() / TOKENS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, optimizer


def wrapped(
    folder: Path, kind: str, **options: Any
) -> tuple[LanguageModel, Parallel, list[list[int]]]:
    """A cut model, its groups, and this process's sequences. kind: dp, ep, cp."""
    rank, size = dist.get_rank(), dist.get_world_size()
    numerics = options.pop("numerics", "deployed")
    spread = (rank, size) if kind == "ep" else (0, 1)
    model = um.load(folder, numerics=numerics, progress=False, experts=spread)
    fsdp.wrap(model, init_device_mesh("cpu", (size,)), **options)
    groups = {"ep": Parallel(experts=dist.group.WORLD), "cp": Parallel(tokens=dist.group.WORLD)}
    mine = sequences() if kind == "cp" else sequences()[rank::size]
    return model, groups.get(kind, Parallel()), mine


CASES = [
    ("dp", "resident", False),
    ("dp", "rebuild", True),
    ("ep", "resident", True),
    ("cp", "rebuild", False),
]


def forwards(folder: Path) -> list[list[Tensor]]:
    """Of each case, the logprobs of this process, after a backward that leaves no gradient out."""
    found = []
    for kind, packed, recompute in CASES:
        model, parallel, mine = wrapped(folder, kind, packed=packed)
        lps = um.logprobs(model, mine, parallel=parallel, recompute=recompute)
        (-torch.cat(lps).sum() / TOKENS).backward()
        without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        assert not without, f"{kind}: no gradient: {without}"
        found.append([lp.detach() for lp in lps])
    return found


@pytest.mark.slow(60)
def test_logprobs_have_the_bits_of_one_process(folder: Path, tmp_path: Path) -> None:
    whole = [lp.detach() for lp in um.logprobs(um.load(folder, progress=False), sequences())]
    answers = run(forwards, 2, tmp_path, folder)
    for rank, found in enumerate(answers):
        for (kind, packed, recompute), lps in zip(CASES, found, strict=True):
            told = um.verify.bits(lps, whole if kind == "cp" else whole[rank::2])
            wanted = TOKENS if kind == "cp" else sum(map(len, whole[rank::2]))
            assert (told.compared, told.unequal) == (wanted, 0), (kind, packed, recompute, told)
    control = [answers[0][0][0].clone(), *answers[0][0][1:]]
    control[0].view(torch.int32)[3] ^= 1
    assert um.verify.bits(control, whole[0::2]).unequal == 1


def stepping(folder: Path) -> list[dict[str, Tensor]]:
    """The masters after three steps of each case, in float32 numerics."""
    found = []
    for kind, packed, recompute in CASES:
        model, parallel, mine = wrapped(folder, kind, packed=packed, numerics="float32")
        trained(model, mine, 3, parallel=parallel, recompute=recompute)
        found.append({n: t.clone() for n, t in fsdp.named_tensors(model, parallel)})
    return found


@pytest.mark.slow(90)
def test_three_steps_give_the_masters_of_one_process(folder: Path, tmp_path: Path) -> None:
    """But for the order in which float32 gradients are added."""
    model = um.load(folder, numerics="float32", progress=False)
    before = {n: t.clone() for n, t in um.named_tensors(model)}
    trained(model, sequences(), 3)
    after = dict(um.named_tensors(model))
    moved = sum(not torch.equal(before[n], after[n]) for n in after)
    assert moved > len(after) // 2
    for found in run(stepping, 2, tmp_path, folder):
        for (kind, *_), masters in zip(CASES, found, strict=True):
            assert masters.keys() == after.keys()
            for name, values in masters.items():
                change = (after[name] - before[name]).abs().max()
                off = (values - after[name]).abs().max()
                assert off <= 1e-3 * change + 1e-6, (kind, name, off, change)


def saving(folder: Path, out: Path, kind: str) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Three steps, saved both ways and exported; then the next logprobs, and the masters."""
    model, parallel, mine = wrapped(folder, kind)
    _, optimizer = trained(model, mine, 3, parallel=parallel)
    torch.manual_seed(11 + dist.get_rank())
    extra = {"step": 3, "weight_version": 7}
    fsdp.save(out / "saved", model, optimizer, extra)
    group = dist.new_group(backend="gloo")
    fsdp.save_async(out / "async", model, optimizer, extra, group=group).result()
    fsdp.export(model, out / "exported", parallel)
    masters = {n: t.clone() for n, t in fsdp.named_tensors(model, parallel)}
    return [lp.detach() for lp in um.logprobs(model, mine, parallel=parallel)], masters


def resuming(
    folder: Path, saved: Path, kind: str
) -> tuple[list[Tensor], dict[str, Tensor], Any, int, list[float]]:
    """What a new process has: logprobs, masters, extra, random seed, momentum sums."""
    model, parallel, mine = wrapped(folder, kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    model.commit_after(optimizer)
    extra = fsdp.load(saved, model, optimizer)
    masters = {n: t.clone() for n, t in fsdp.named_tensors(model, parallel)}
    lps = [lp.detach() for lp in um.logprobs(model, mine, parallel=parallel)]
    rates = [group["lr"] for group in optimizer.param_groups]
    return lps, masters, extra, torch.initial_seed(), rates


@pytest.mark.slow(120)
@pytest.mark.parametrize(
    ("kind", "then", "processes"), [("dp", "dp", 2), ("ep", "ep", 2), ("ep", "dp", 1)]
)
def test_resuming_is_exact_whatever_the_layout_E10_F17(
    kind: str, then: str, processes: int, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = run(saving, 2, tmp_path / "a", folder, out, kind)
    lps: list[Any] = [None] * len(LENGTHS)
    for rank, (mine, _) in enumerate(first):
        lps[rank::2] = mine
    for saved in ("saved", "async"):
        second = run(resuming, processes, tmp_path / "b", folder, out / saved, then)
        for rank, (mine, masters, extra, seed, rates) in enumerate(second):
            told = um.verify.bits(mine, lps[rank::processes])
            assert told.unequal == 0 and told.compared > 0
            assert extra == {"step": 3, "weight_version": 7} and rates == [0.05]
            assert seed == 11 + rank
            for name, values in first[0][1].items():
                assert torch.equal(masters[name], values), name
    exported = um.load(out / "exported", progress=False)
    told = um.verify.bits(um.logprobs(exported, sequences()), lps)
    assert (told.compared, told.unequal) == (TOKENS, 0)


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    um.make_tiny("qwen3", tmp_path / "qwen3")
    run(refusing, 1, tmp_path, tmp_path / "qwen3")


def refusing(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with pytest.raises(ValueError, match="packed must be one of resident, rebuild, got 'none'"):
        fsdp.wrap(um.load(folder, progress=False), mesh, packed="none")
    with pytest.raises(ValueError, match="packed bytes only"):
        fsdp.wrap(um.load(folder, weights="packed", progress=False), mesh)
    model = fsdp.wrap(um.load(folder, progress=False), mesh)
    with pytest.raises(ValueError, match="wrapped once"):
        fsdp.wrap(model, mesh)
    with pytest.raises(ValueError, match="cut over processes"):
        dict(um.named_tensors(model))
    with pytest.raises(ValueError, match="cut over processes"):
        model.embed.assign(torch.zeros(model.embed.shape))
