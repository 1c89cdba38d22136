"""FSDP2 over gloo processes: saving, resuming and exporting in any layout, processes without tokens, and refusals."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import unified_models as um
from tests.adapters.fsdp.layouts import (
    LENGTHS,
    TOKENS,
    Layout,
    detached,
    gradients,
    masters,
    sequences,
    share,
    trained,
    wrapped,
)
from tests.processes import run
from unified_models.adapters import fsdp

DP, EP = Layout(), Layout(ep=2)
PROGRESS = {"step": 3, "weight_version": 7}
SAVES = ("saved", "async")


class Resumed(NamedTuple):
    """What a model has that was made anew and loaded."""

    lps: list[Tensor]
    masters: dict[str, Tensor]
    extra: Any
    seed: int
    rates: list[float]


Found = tuple[list[Tensor], dict[str, Tensor]]
"""Logprobs and masters after three steps."""


def saving(folder: Path, out: Path, layout: Layout) -> Found:
    """Three steps, saved both ways and exported."""
    cut = wrapped(folder, layout)
    optimizer = trained(cut.model, cut.mine, 3, parallel=cut.parallel)
    torch.manual_seed(11 + dist.get_rank())
    fsdp.save(out / "saved", cut.model, optimizer, PROGRESS)
    group = dist.new_group(backend="gloo")
    fsdp.save_async(out / "async", cut.model, optimizer, PROGRESS, group=group).result()
    fsdp.export(cut.model, out / "exported", cut.parallel)
    with pytest.raises(ValueError, match=r"cut over processes; call adapters\.fsdp\.export"):
        um.save(cut.model, out / "part")
    assert not (out / "part").exists()
    with torch.no_grad():
        return um.logprobs(cut.model, cut.mine, parallel=cut.parallel), masters(cut)


def resuming(
    folder: Path, out: Path, layout: Layout, saves: Sequence[str] = SAVES[:1]
) -> list[Resumed]:
    """Of each save, with a fresh model."""
    found = []
    for saved in saves:
        cut = wrapped(folder, layout)
        optimizer = torch.optim.SGD(cut.model.parameters(), lr=0.5, momentum=0.9)
        cut.model.commit_after(optimizer)
        torch.manual_seed(0)
        extra = fsdp.load(out / saved, cut.model, optimizer)
        lps = detached(um.logprobs(cut.model, cut.mine, parallel=cut.parallel))
        rates = [group["lr"] for group in optimizer.param_groups]
        found.append(Resumed(lps, masters(cut), extra, torch.initial_seed(), rates))
    return found


def two(folder: Path, out: Path) -> tuple[Found, Found, dict[str, list[Resumed]]]:
    """What two processes save and read: of `dp`, `ep`, and the four processes' `ep edp`."""
    dp, ep = saving(folder, out / "dp", DP), saving(folder, out / "ep", EP)
    reads = {"dp": DP, "ep": EP, "ep edp": DP}
    found = {name: resuming(folder, out / name, layout) for name, layout in reads.items()}
    return dp, ep, found | {"ep, async": resuming(folder, out / "ep", EP, SAVES[1:])}


def check_resumed(saved: Sequence[Found], by: Layout, read: Any, then: Layout, name: str) -> Any:
    """Every process that read has what those that saved had; the logprobs of all sequences."""
    lps: list[Any] = [None] * len(LENGTHS)
    for rank, (mine, _) in enumerate(saved):
        lps[share(by, rank, len(saved))] = mine
    for rank, saves in enumerate(read):
        for got in saves:
            told = um.verify.bits(got.lps, lps[share(then, rank, len(read))])
            assert told.unequal == 0 and told.compared > 0, name
            assert (got.extra, got.rates, got.seed) == (PROGRESS, [0.05], 11 + rank), name
            for tensor, values in saved[0][1].items():
                assert torch.equal(got.masters[tensor], values), (name, tensor)
    return lps


@pytest.mark.slow(60)
def test_resuming_is_exact_whatever_the_layout_E10_F17(folder: Path, tmp_path: Path) -> None:
    """Saved by 2 processes, each with all experts or with half of them, and by 4, two with each half; read by as many,
    by 2 with all experts, and by one. What they export is a checkpoint of the same bits."""
    out = tmp_path / "out"
    four: list[Found] = run(saving, 4, tmp_path / "4", folder, out / "ep edp", EP)
    answers = run(two, 2, tmp_path / "2", folder, out)
    one = run(resuming, 1, tmp_path / "1", folder, out / "ep", DP)
    dp, ep = ([answer[i] for answer in answers] for i in range(2))
    for name, saved, by, read, then in (
        ("dp", dp, DP, [answer[2]["dp"] for answer in answers], DP),
        ("ep", ep, EP, [answer[2]["ep"] for answer in answers], EP),
        ("ep", ep, EP, [answer[2]["ep, async"] for answer in answers], EP),
        ("ep edp", four, EP, [answer[2]["ep edp"] for answer in answers], DP),
        ("ep", ep, EP, one, DP),
    ):
        lps = check_resumed(saved, by, read, then, name)
        exported = um.load(out / name / "exported", progress=False)
        told = um.verify.bits(um.logprobs(exported, sequences()), lps)
        assert (told.compared, told.unequal) == (TOKENS, 0), name


FEW = [[[3, 1, 4, 1, 5, 9, 2, 6]], [[5]], [[]], [[], []]]
IDLE = [(FEW[0], FEW[1]), (FEW[0], FEW[2]), (FEW[2], FEW[0]), (FEW[1], FEW[3])]
"""The sequences of each of two processes."""


def idle(folder: Path) -> list[tuple[int, dict[str, Tensor]]]:
    """Of each case, values in this process's gradients that are not 0, and masters after a step."""
    found = []
    for i, packs in enumerate(IDLE):
        cut = wrapped(folder, DP, "float32", packed=("resident", "rebuild")[i % 2])
        how, mine = {"recompute": i % 2 == 0}, packs[dist.get_rank()]
        torch.cat(um.logprobs(cut.model, mine, **how)).sum().backward()
        grads = gradients(cut.model).values()
        trained(cut.model, mine, 1, tokens=7, **how)
        found.append((sum(int(grad.count_nonzero()) for grad in grads), masters(cut)))
    return found


@pytest.mark.slow(20)
def test_processes_without_tokens_F10(folder: Path, tmp_path: Path) -> None:
    """Nobody waits for ever; gradients are those of the tokens that there are, and zeros where there are none."""
    answers = run(idle, 2, tmp_path, folder)
    start = um.load(folder, numerics="float32", progress=False)
    before = {n: t.clone() for n, t in um.named_tensors(start)}
    trained(start, FEW[0], 1, tokens=7)
    after = dict(um.named_tensors(start))
    for answer in answers:
        for (one, other), (some, found) in zip(IDLE, answer, strict=True):
            tokens = FEW[0] in (one, other)
            assert bool(some) == tokens
            for name, values in found.items():
                want = after[name] if tokens else before[name]
                change = (after[name] - before[name]).abs().max()
                assert (values - want).abs().max() <= (1e-3 * change + 1e-6) * tokens, name
    assert sum(not torch.equal(before[n], after[n]) for n in after) > len(after) // 3


def test_what_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    um.make_tiny("qwen3", tmp_path / "qwen3")
    um.make_tiny("nemotron_h", tmp_path / "nemotron")
    run(refusing, 1, tmp_path, tmp_path / "qwen3", tmp_path / "nemotron")


def refusing(folder: Path, experts: Path) -> None:
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
    part = um.load(experts, experts=(1, 2), progress=False)
    with pytest.raises(ValueError, match=r"holds experts 4 to 7 of 8.* mesh of 1 of which 1 "):
        fsdp.wrap(part, mesh)
