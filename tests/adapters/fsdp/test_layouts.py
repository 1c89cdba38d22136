"""FSDP2 in every layout over 2 and 4 processes, with and without activation checkpointing, packed bytes that stay and
such that are derived: the bits of one process, its gradients, and its masters after some steps."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import unified_models as um
from tests.adapters.fsdp.layouts import (
    LAYOUTS,
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

WAYS = [("resident", False), ("resident", True), ("rebuild", False), ("rebuild", True)]
"""packed, recompute"""


def ways_of(number: int, processes: int) -> list[tuple[str, bool]]:
    """Of a layout: over 2 processes all, over 4 each packed and each recompute once."""
    if processes == 2:
        return WAYS
    return [WAYS[1], WAYS[2]] if number % 2 else [WAYS[0], WAYS[3]]


class Told(NamedTuple):
    """Of one layout in one process: logprobs and unequal gradients of each way, and masters after three steps."""

    lps: list[list[Tensor]]
    compared: int
    unequal: list[int]
    masters: dict[str, Tensor]


def each_way(
    folder: Path, layout: Layout, ways: list[tuple[str, bool]], steps: tuple[str, bool]
) -> Told:
    """steps: the way of the three steps, in float32 numerics."""
    lps, grads, models = [], [], {}
    for packed, recompute in ways:
        if packed not in models:
            models[packed] = wrapped(folder, layout, packed=packed)
        model, parallel, mine = models[packed]
        scored = um.logprobs(model, mine, parallel=parallel, recompute=recompute)
        (-torch.cat(scored).sum() / TOKENS).backward()
        lps.append(detached(scored))
        grads.append(list(gradients(model).values()))
    told = [um.verify.bits(grad, grads[0]) for grad in grads]
    cut = wrapped(folder, layout, "float32", packed=steps[0])
    trained(cut.model, cut.mine, 3, parallel=cut.parallel, recompute=steps[1])
    return Told(lps, told[0].compared, [each.unequal for each in told], masters(cut))


def every_layout(folder: Path, layouts: dict[str, Layout]) -> dict[str, Told]:
    """The ways of the steps are those of WAYS in turn."""
    found = {}
    for i, (name, layout) in enumerate(layouts.items()):
        ways = ways_of(i, dist.get_world_size())
        found[name] = each_way(folder, layout, ways, WAYS[i % len(WAYS)])
    return found


def one_process(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Masters before and after the three steps."""
    model = um.load(folder, numerics="float32", progress=False)
    before = {n: t.clone() for n, t in um.named_tensors(model)}
    trained(model, sequences(), 3)
    after = dict(um.named_tensors(model))
    assert sum(not torch.equal(before[n], after[n]) for n in after) > len(after) // 2
    return before, after


@pytest.mark.slow(60)
@pytest.mark.parametrize("processes", LAYOUTS)
def test_every_layout_is_one_process(processes: int, folder: Path, tmp_path: Path) -> None:
    """Logprobs: the bits. Gradients: the same bits with and without recomputation, with packed bytes that stay and
    without. Masters after three steps of SGD, in float32 numerics: but for the order of float32 additions."""
    layouts = LAYOUTS[processes]
    answers: list[dict[str, Told]] = run(every_layout, processes, tmp_path, folder, layouts)
    whole = detached(um.logprobs(um.load(folder, progress=False), sequences()))
    before, after = one_process(folder)
    for rank, answer in enumerate(answers):
        for i, (name, layout) in enumerate(layouts.items()):
            told, want = answer[name], whole[share(layout, rank, processes)]
            ways = ways_of(i, processes)
            for way, lps in zip(ways, told.lps, strict=True):
                bits = um.verify.bits(lps, want)
                assert (bits.compared, bits.unequal) == (sum(map(len, want)), 0), (name, way, bits)
            assert told.unequal == [0] * len(ways) and told.compared > 1000, name
            same_but_for_order(told.masters, before, after, name)
    assert sum(map(len, whole)) == TOKENS and len(whole) == len(LENGTHS)
    controls(answers[0], whole, processes, before, after)


def same_but_for_order(got: Any, before: Any, after: Any, name: str) -> None:
    """Of each tensor, 1e-3 of its largest change."""
    assert got.keys() == after.keys()
    for tensor, values in got.items():
        change = (after[tensor] - before[tensor]).abs().max()
        off = (values - after[tensor]).abs().max()
        assert off <= 1e-3 * change + 1e-6, (name, tensor, off, change)


def controls(answer: Any, whole: Any, processes: int, before: Any, after: Any) -> None:
    """One ulp in a logprob and a master that did not move are seen."""
    lps = [lp.clone() for lp in answer[f"FSDP {processes}"].lps[0]]
    lps[0].view(torch.int32)[3] ^= 1
    assert um.verify.bits(lps, whole[::processes]).unequal == 1
    with pytest.raises(AssertionError, match="never moved"):
        same_but_for_order(before, before, after, "never moved")
