"""`um.logprobs`: which backward it refuses, gradients where nothing is scored, and the context that it runs under."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import unified_models as um
from unified_models import checkpoint
from unified_models.context.local import LocalContext
from unified_models.context.parallel import Parallel, ParallelContext
from unified_models.context.plain import PlainContext
from unified_models.model import LanguageModel

MIXED = Path(__file__).parent.parent / "configs/tiny/nemotron_h_mixed.json"
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {"num_hidden_layers": 3, "compress_ratios": [0, 4, 8], "num_hash_layers": 1},
    "nemotron_h": {"config": MIXED},
}
PACK = [[3, 1, 4, 1, 5, 9], [], [2, 6, 5]]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("training") / request.param
    um.make_tiny(request.param, folder, seed=3, **MODELS[request.param])
    return folder


def by_step(model: LanguageModel) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.commit_after(optimizer)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def by_update(model: LanguageModel) -> None:
    checkpoint.update(model, [(n, t.clone()) for n, t in um.named_tensors(model)])


def by_load(model: LanguageModel) -> None:
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()})
    model.commit()


def by_copy(model: LanguageModel) -> None:
    """Of the weight that a backward comes to last."""
    with torch.no_grad():
        model.embed.master.copy_(torch.zeros(model.embed.shape))  # type: ignore[union-attr]


CHANGES = [by_step, by_update, by_load, by_copy]


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_backward_after_a_change_is_refused(
    change: Callable[[LanguageModel], None], recompute: bool, folder: Path
) -> None:
    """Before anything of it has run: no gradient is there, whichever master it was. The control: without the change."""
    model = um.load(folder, progress=False)
    loss = torch.cat(um.logprobs(model, PACK, recompute=recompute)).sum()
    loss.backward(retain_graph=True)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    model.zero_grad()
    change(model)
    first = "embed" if change is by_copy else r"\w+[\w.]*"
    told = rf"{first}: the master changed between forward and backward \(version .* then, .* now\)"
    with pytest.raises(RuntimeError, match=told) as refused:
        loss.backward()
    assert ("more" in str(refused.value)) == (change is not by_copy)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.commit()
    torch.cat(um.logprobs(model, PACK, recompute=recompute)).sum().backward()


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("pack", [[[]], [[], []], [[7]], [[], [7]]], ids=str)
def test_nothing_to_score_has_gradients_of_zero_F10(
    pack: list[list[int]], recompute: bool, folder: Path
) -> None:
    model = um.load(folder, progress=False)
    lps = um.logprobs(model, pack, recompute=recompute)
    assert [len(lp) for lp in lps] == [0] * len(pack)
    torch.cat(lps).sum().backward()
    seen = 0
    for path, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), path
            seen += parameter.numel()
    assert seen > 100_000


def test_notes_come_once_F09(folder: Path) -> None:
    """With recomputation and a graph that is run back through twice, the notes are those of the forward."""
    model = um.load(folder, progress=False)
    told = []
    for recompute in (False, True):
        notes: list[tuple[nn.Module, str]] = []
        context = partial(
            LocalContext, onlooker=lambda site, name, _, to=notes: to.append((site, name))
        )
        loss = torch.cat(um.logprobs(model, PACK, recompute=recompute, context=context)).sum()
        forward = notes[:]
        loss.backward(retain_graph=True)
        loss.backward()
        assert notes == forward
        torch.cat(um.logprobs(model, PACK, recompute=recompute, context=context))
        assert notes == [*forward, *forward]
        told.append(forward)
    assert told[0] == told[1] and len(told[0]) > 3


def test_a_context_that_knows_no_other_process_is_refused(folder: Path) -> None:
    """Those that do are used: tests/context/test_parallel_gradients.py looks at one."""
    model = um.load(folder, progress=False)
    shared = Parallel(experts=object())
    for context in (LocalContext, PlainContext, lambda step, memory=None: None):
        with pytest.raises(
            ValueError, match=r"context '\S+' takes no `parallel`, and parallel is P"
        ):
            um.logprobs(model, PACK, context=context, parallel=shared)
    with pytest.raises(LookupError, match="as it was asked for"):
        um.logprobs(model, PACK, context=Asked, parallel=shared)


class Asked(ParallelContext):
    """Says that it is made."""

    def __init__(self, *args: Any, parallel: Parallel) -> None:
        super().__init__(*args, parallel=parallel)
        raise LookupError("as it was asked for")
