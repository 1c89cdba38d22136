"""A master that changed between forward and backward, under FSDP2: every process refuses the backward before anything
of it runs, and the model goes on afterwards."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import unified_models as um
from tests.adapters.fsdp.layouts import Cut, Layout, detached, gradients, masters, wrapped
from tests.processes import run
from unified_models import checkpoint
from unified_models.adapters import fsdp
from unified_models.model import LanguageModel

PACK = [[3, 1, 4, 1, 5, 9, 2, 6, 5], [2, 7, 1, 8, 2], [8, 1, 8], [5]]
WAYS = [("resident", False), ("resident", True), ("rebuild", False), ("rebuild", True)]
"""packed, recompute"""
REFUSED = "the master changed between forward and backward"


class Trained(NamedTuple):
    """A cut model with its optimizer, and where its state was saved."""

    cut: Cut
    optimizer: torch.optim.Optimizer
    saved: Path
    recompute: bool

    @property
    def loss(self) -> tuple[list[Tensor], Tensor]:
        """Logprobs of this process, and what backward starts from."""
        model, parallel, _ = self.cut
        mine = PACK[dist.get_rank() :: dist.get_world_size()]
        lps = um.logprobs(model, mine, recompute=self.recompute, parallel=parallel)
        return detached(lps), torch.cat(lps).sum()


def by_step(it: Trained) -> None:
    """The optimizer's, which commits."""
    for parameter in (p for group in it.optimizer.param_groups for p in group["params"]):
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter) * 1e-3
    it.optimizer.step()
    it.optimizer.zero_grad()


def by_load(it: Trained) -> None:
    """Everything as it was saved, which commits."""
    fsdp.load(it.saved, it.cut.model, it.optimizer)


def by_copy(it: Trained) -> None:
    """In place, of the last weight that a backward comes to; nothing is committed."""
    owned: Any = it.cut.model.embed.owned  # type: ignore[union-attr]
    with torch.no_grad():
        owned.copy_(owned * 1.25)


def by_copy_of_one(it: Trained) -> None:
    """The same in the first process alone."""
    if dist.get_rank() == 0:
        by_copy(it)


CHANGES = [by_step, by_copy, by_load, by_copy_of_one]


def refusals(folder: Path, out: Path) -> Iterator[tuple[Any, ...]]:
    """Of each way and change: what was said, and logprobs and masters after it."""
    for i, (packed, recompute) in enumerate(WAYS):
        cut = wrapped(folder, Layout(), packed=packed)
        optimizer = torch.optim.SGD(cut.model.parameters(), lr=0.05)
        cut.model.commit_after(optimizer)
        it = Trained(cut, optimizer, out / f"saved{i}", recompute)
        fsdp.save(it.saved, cut.model, optimizer)
        for change in CHANGES:
            yield (packed, recompute, change.__name__, *refused(it, change))


def refused(it: Trained, change: Callable[[Trained], None]) -> tuple[Any, ...]:
    """A backward after a change, twice; then the model goes on."""
    _, loss = it.loss
    change(it)
    said = []
    for _ in range(2):
        with pytest.raises(RuntimeError) as told:
            loss.backward(retain_graph=True)
        said.append(str(told.value))
    assert all(weight.owned.grad is None for _, weight in it.cut.model.weights())
    if change is by_copy_of_one:
        by_load(it)
    it.cut.model.commit()
    lps, loss = it.loss
    loss.backward()
    grads = list(gradients(it.cut.model).values())
    if change is by_step:  # nothing of the refused backward is in the gradients of the next
        it.loss[1].backward()
        again = um.verify.bits(list(gradients(it.cut.model).values()), grads)
        assert again.unequal == 0 and again.compared > 1000, again
    return said, lps, masters(it.cut)


def unread(folder: Path) -> list[tuple[list[Tensor], dict[str, Tensor]]]:
    """Forwards that nobody goes back through, then a step: the next logprobs, and the masters. An update, and an
    optimizer that is made in between, are refused and change nothing."""
    found = []
    for packed, recompute in WAYS:
        cut = wrapped(folder, Layout(), packed=packed)
        optimizer = torch.optim.SGD(cut.model.parameters(), lr=0.05)
        cut.model.commit_after(optimizer)
        it = Trained(cut, optimizer, Path(), recompute)
        with torch.no_grad():
            before, _ = it.loss
        with pytest.raises(
            ValueError, match="embed: the optimizer holds the copy that was made who"
        ):
            cut.model.commit_after(torch.optim.SGD(cut.model.parameters()))
        _, loss = it.loss
        with pytest.raises(ValueError, match="cut over processes, and takes no whole values"):
            checkpoint.update(cut.model, masters(cut).items())
        loss.backward()
        gradients(cut.model)
        with torch.no_grad():
            assert um.verify.bits(it.loss[0], before).unequal == 0
        by_step(it)
        with torch.no_grad():
            found.append((it.loss[0], masters(cut)))
        assert um.verify.bits(found[-1][0], before).unequal > 0
    return found


def job(folder: Path, out: Path) -> tuple[list[tuple[Any, ...]], list[Any]]:
    """Both, in the same processes."""
    return list(refusals(folder, out)), unread(folder)


@pytest.mark.slow(60)
def test_a_changed_master_is_refused_everywhere(folder: Path, tmp_path: Path) -> None:
    """By a step, a load, an in-place copy, and one that a single process did; with activation checkpointing and
    without, packed bytes that stay and such that are derived. The next logprobs have the bits of one process that was
    given the masters, also after forwards that had made masters whole and had no backward."""
    model = um.load(folder, progress=False)
    for rank, (answer, forwards) in enumerate(run(job, 2, tmp_path, folder, tmp_path)):
        assert len(answer) == len(WAYS) * len(CHANGES)
        for packed, recompute, change, said, lps, found in answer:
            other = change == "by_copy_of_one" and rank == 1
            wanted = REFUSED.replace("the", "a", 1) + " on another process" if other else REFUSED
            assert all(wanted in text for text in said), (packed, recompute, change, said)
            same_bits(lps, model, found, rank)
        assert len(forwards) == len(WAYS)
        for lps, found in forwards:
            same_bits(lps, model, found, rank)


def same_bits(lps: list[Tensor], model: LanguageModel, found: Any, rank: int) -> None:
    """As one process that is given the masters."""
    checkpoint.update(model, found.items())
    want = detached(um.logprobs(model, PACK[rank::2]))
    bits = um.verify.bits(lps, want)
    assert bits.unequal == 0 and bits.compared == sum(map(len, want)) > 3, bits
