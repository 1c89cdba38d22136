"""Megatron's wrapper, optimizer, schedules and checkpoints around the zoo's models, over two processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import unified_models as um
from tests.adapters.megatron import jobs
from tests.adapters.megatron.jobs import CROSSINGS, LAYOUTS, RATES, STEPS, TEMPERATURE, packs
from tests.context.test_parallel import MODELS
from tests.processes import run
from unified_models import verify
from unified_models.context.interface import Experts

pytestmark = pytest.mark.megatron
DENSE = "qwen3"
MADE = MODELS | {DENSE: {"tie_word_embeddings": True, "num_hidden_layers": 4}}
Answers = list[dict[str, dict[str, Any]]]
"""By process and layout."""


class Found(NamedTuple):
    """A checkpoint, and what two processes made of it."""

    folder: Path
    names: list[str]
    deployed: Answers
    float32: Answers
    refusals: list[dict[str, str]]


@pytest.fixture(scope="module")
def runs(megatron: str) -> dict[str, Found]:
    """By model, what has been run: pytest makes a parametrised fixture anew whenever the model changes."""
    return {}


@pytest.fixture(params=list(MADE))
def found(
    request: pytest.FixtureRequest,
    runs: dict[str, Found],
    tmp_path_factory: pytest.TempPathFactory,
) -> Found:
    """One run for all tests of a model, since Megatron's import is slow."""
    model = str(request.param)
    if model not in runs:
        place = tmp_path_factory.mktemp("megatron")
        um.make_tiny(model, place / "tiny", seed=3, **MADE[model])
        names = [n for n, layout in LAYOUTS.items() if model != DENSE or layout.ep == 1]
        answers = run(jobs.everything_job, 2, place, place / "tiny", names, patience=1200)
        parts = [[answer[part] for answer in answers] for part in answers[0]]
        runs[model] = Found(place / "tiny", names, *parts)
    return runs[model]


def same(got: Any, want: Any) -> int:
    """How many values were compared; AssertionError where bits differ."""
    found = verify.bits(got, want)
    assert found.unequal == 0, f"{found}"
    return found.compared


def microbatches(answers: Answers, layout: str, what: str) -> Iterator[tuple[int, list[Tensor]]]:
    """(number, logprobs) of each microbatch, of every process that has them."""
    for answer in answers:
        for number, arrays in answer[layout][what].items():
            yield number, [torch.from_numpy(lp) for lp in arrays]


def whole(answers: Answers, layout: str) -> dict[str, Tensor]:
    """Main parameters of a layout, float32, from all processes; experts apart are stretches of one stack."""
    out: dict[str, Tensor] = {}
    for answer in answers:
        for path, value in torch.load(answer[layout]["mains"]).items():
            if path in out and LAYOUTS[layout].ep > 1 and ".experts." in path:
                out[path] = torch.cat((out[path], value))
            elif path in out:
                same([out[path]], [value])
            else:
                out[path] = value
    return out


def digests(answers: Answers, layout: str) -> dict[str, tuple[int, str]]:
    """(bytes, hash) of every state of the optimizer, from all processes, which agree where they have the same."""
    out: dict[str, tuple[int, str]] = {}
    for answer in answers:
        for key, value in answer[layout]["states"].items():
            assert out.setdefault(key, value) == value, key
    return out


def alone(folder: Path, numerics: str = "deployed") -> Any:
    return um.load(folder, numerics=numerics, progress=False)


def every_pack(model: Any) -> list[list[Tensor]]:
    with torch.no_grad():
        return [um.logprobs(model, pack, TEMPERATURE) for pack in packs()]


@pytest.mark.slow(400)
def test_logprobs_are_those_of_one_process(found: Found) -> None:
    """In a forward alone and in a training step with activation checkpointing. The control: after three steps."""
    want = every_pack(alone(found.folder))
    for layout in found.names:
        for what in ("first", "recomputed"):
            seen = set()
            for number, lps in microbatches(found.deployed, layout, what):
                assert same(lps, want[number]) > 40, layout
                seen.add(number)
            assert seen == set(range(len(want))), f"{layout}: {what} ran {seen}"
        moved = [
            verify.bits(lps, want[n]) for n, lps in microbatches(found.deployed, layout, "after")
        ]
        assert all(each.unequal > 0.5 * each.compared for each in moved), layout


@pytest.mark.slow(60)
def test_packed_bytes_follow_the_optimizer(found: Found) -> None:
    """After three steps a single process, given the optimizer's float32 parameters, has the same logprobs: bfloat16
    parameters pack to the same bytes. The control: its old ones, above."""
    for layout in found.names:
        mains = whole(found.deployed, layout)
        model = alone(found.folder)
        trained = {path: weight for path, weight in model.weights() if not weight.frozen}
        assert trained.keys() == mains.keys()
        for path, weight in trained.items():
            weight.assign(mains[path])
        want = every_pack(model)
        for number, lps in microbatches(found.deployed, layout, "after"):
            assert same(lps, want[number]) > 40, layout


@pytest.mark.slow(10)
def test_resume_is_equal(found: Found) -> None:
    """Saved at step 3 and read by a new trainer: logprobs, main parameters and states, also one step later. The
    control: that step changed them."""
    for layout in found.names:
        for answer in found.deployed:
            told = answer[layout]
            assert sum(size for size, _ in told["states"].values()) > 100_000
            assert told["resumed"]["states"] == told["states"], layout
            assert told["resumed"]["later"] == told["later"], layout
            changed = set(told["later"].values()) - set(told["states"].values())
            assert len(changed) > 0.9 * len(told["later"]), layout
            for number, lps in told["after"].items():
                again = told["resumed"]["after"][number]
                assert (
                    same(*([torch.from_numpy(a) for a in arrays] for arrays in (again, lps))) > 40
                )


@pytest.mark.slow(10)
def test_checkpoint_of_another_layout(found: Found) -> None:
    """Experts of two processes on one, of one on two, stages on one process and back. The control: two layouts that
    trained differ in some state, since they added gradients in other orders."""
    crossings = [pair for pair in CROSSINGS if {*pair} <= {*found.names}]
    assert crossings
    for wrote, read in crossings:
        want, got = (digests(found.deployed, name) for name in (wrote, f"{wrote} as {read}"))
        assert sum(size for size, _ in want.values()) > 1_000_000
        assert got == want, f"{wrote} as {read}"
        lps = dict(microbatches(found.deployed, wrote, "after"))
        for number, again in microbatches(found.deployed, f"{wrote} as {read}", "after"):
            assert same(again, lps[number]) > 40, f"{wrote} as {read}"
    assert digests(found.deployed, "cp2") != digests(found.deployed, "dp2")


def steps_alone(
    folder: Path, numerics: str, steps: int = STEPS, turn: int = 1
) -> dict[str, Tensor]:
    """Main parameters after steps of torch's AdamW in one process. turn: -1 adds gradients of packs in other order."""
    model = alone(folder, numerics)
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": RATES["lr"], "eps": RATES["adam_eps"], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(trained, **options)
    model.commit_after(optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        tokens = 0
        for pack in packs()[::turn]:
            total, count, _ = jobs.weighted(um.logprobs(model, pack, TEMPERATURE), None)
            total.backward()
            tokens += count
        for p in trained:
            assert p.grad is not None
            p.grad /= tokens
        optimizer.step()
    return {path: w.master.detach() for path, w in model.weights() if not w.frozen}


def furthest(
    got: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]
) -> list[float]:
    """Of each parameter, the largest difference as a part of its largest move; sorted."""
    moves = {path: float((want[path] - start[path]).abs().max()) for path in want}
    assert got.keys() == want.keys() and all(move > 0 for move in moves.values())
    return sorted(float((got[path] - want[path]).abs().max()) / moves[path] for path in want)


@pytest.mark.slow(120)
def test_steps_are_those_of_one_process(found: Found) -> None:
    """Three steps. Gradients are added in float32 in other orders, so that unquantised masters agree to what float32
    rounds: of moves of 3e-4 around 1, half a bit a step is 2e-4. Deployed, a master that is off by so little may pack
    to another byte: then as one process is that adds its packs in the other order. The controls: a step less."""
    for numerics, answers in (("float32", found.float32), ("deployed", found.deployed)):
        start = steps_alone(found.folder, numerics, 0)
        want = steps_alone(found.folder, numerics)
        less = furthest(steps_alone(found.folder, numerics, STEPS - 1), want, start)
        turned = furthest(steps_alone(found.folder, numerics, turn=-1), want, start)
        print(numerics, "less", less[0], "turned", turned[len(turned) // 2], turned[-1])
        for layout in answers[0].keys() & {*found.names}:
            off = furthest(whole(answers, layout), want, start)
            print(numerics, layout, off[len(off) // 2], off[-1])
            tolerance = 5e-4 if numerics == "float32" else 0.1
            assert off[-1] < tolerance < less[0], f"{numerics}, {layout}: {off[-1]}"


def test_refusals(found: Found) -> None:
    """One line each, naming what was given."""
    model = alone(found.folder)
    blocks, experts = len(model.blocks), [m for m in model.modules() if isinstance(m, Experts)]
    want = {
        "gradients": "grad_reduce_in_fp32 is False: gradients are float32, and added so",
        "gathering": "overlap_param_gather is True: packed bytes are derived from whole masters",
        "loss": "calculate_per_token_loss is False: packs have as many tokens as they have",
        "packed": "embed holds packed bytes only: load with weights='master' to train",
        "sizes": f"stages of [1, 1] blocks: expected 1, {blocks} blocks in all",
        "empty": "a microbatch of 2 sequences without a token",
        "tensors": "tensor_model_parallel_size is 2: 1 alone gives the bits of one process",
        "experts": "",
    }
    if experts:
        want["experts"] = (
            f"{experts[0].up.label} holds 4 of 8 experts from 4: load with experts=(0, 1)"
        )
    assert found.refusals == [want, want]
