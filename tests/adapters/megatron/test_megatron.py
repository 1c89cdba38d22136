"""Megatron's wrapper, optimizer, schedules and checkpoints around the zoo's models, over two processes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import unified_models as um
from tests.adapters.megatron import jobs
from tests.adapters.megatron.jobs import CROSSINGS, LAYOUTS, STEPS, TEMPERATURE, packs, plain_steps
from tests.context.test_parallel import MODELS
from tests.processes import run
from unified_models import verify
from unified_models.context.interface import Experts

pytestmark = pytest.mark.megatron
DENSE = "qwen3"
MADE = MODELS | {DENSE: {"tie_word_embeddings": True, "num_hidden_layers": 4}}
TOLERANCE = {"float32": (5e-6, 5e-6), "deployed": (0.01, 0.1)}
"""Of a parameter's move: the middle one and the furthest."""
Answers = list[dict[str, dict[str, Any]]]
"""By process and layout."""


class Found(NamedTuple):
    """A checkpoint, and what two processes made of it."""

    folder: Path
    names: list[str]
    deployed: Answers
    float32: Answers
    plain: Answers
    refusals: list[dict[str, str]]


@pytest.mark.slow(300)
@pytest.mark.parametrize("model", list(MADE))
def test_megatron_keeps_the_bits(model: str, megatron: str, tmp_path: Path) -> None:
    """Two processes, every layout: logprobs, what an optimizer's steps make of them, checkpoints, refusals. One test a
    model, since Megatron's import is slow."""
    um.make_tiny(model, tmp_path / "tiny", seed=3, **MADE[model])
    names = [n for n, layout in LAYOUTS.items() if model != DENSE or layout.ep == 1]
    answers = run(jobs.everything_job, 2, tmp_path, tmp_path / "tiny", names, patience=1200)
    parts = [[answer[part] for answer in answers] for part in answers[0]]
    found = Found(tmp_path / "tiny", names, *parts)
    check_logprobs_are_those_of_one_process(found)
    check_packed_bytes_follow_the_optimizer(found)
    check_resume_is_equal(found)
    check_checkpoint_of_another_layout(found)
    check_steps_are_those_of_one_process(found)
    check_refusals(found)


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


def check_logprobs_are_those_of_one_process(found: Found) -> None:
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


def check_packed_bytes_follow_the_optimizer(found: Found) -> None:
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


def check_resume_is_equal(found: Found) -> None:
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


def check_checkpoint_of_another_layout(found: Found) -> None:
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


def furthest(
    got: dict[str, Tensor], want: dict[str, Tensor], start: dict[str, Tensor]
) -> list[float]:
    """Of each parameter, the largest difference as a part of its largest move; sorted. Less what float32 rounds of the
    parameter itself: half a bit a step, in both."""
    assert got.keys() == want.keys()
    out = []
    for path, truth in want.items():
        move = (truth - start[path]).abs().max()
        rounded = 2 * STEPS * 2**-24 * truth.abs()
        assert move > 0, path
        out.append(float(((got[path] - truth).abs() - rounded).clamp_min(0).max() / move))
    return sorted(out)


def check_steps_are_those_of_one_process(found: Found) -> None:
    """Three steps; gradients are added in float32 in other orders. Deployed, a master that is off by a bit may pack to
    another byte, which in a tiny model is felt: by one process that adds its packs in the other order, too. Under
    context parallelism, gradients of what tokens share are rounded to bfloat16 after another sum; then the steps are
    those of such parallelism without Megatron. The controls: the packs in other order, and a step less."""
    for numerics, answers in (("float32", found.float32), ("deployed", found.deployed)):
        start, less, want = (
            plain_steps(alone(found.folder, numerics), steps) for steps in (0, STEPS - 1, STEPS)
        )
        middle, most = TOLERANCE[numerics]
        turned = furthest(plain_steps(alone(found.folder, numerics), STEPS, -1), want, start)
        control = furthest(less, want, start)
        assert 0 < turned[-1] < most and control[len(control) // 2] > 0.2, numerics
        layouts = [name for name in found.names if name in answers[0]]
        assert len(layouts) > 2
        for layout in layouts:
            shared = numerics == "deployed" and LAYOUTS[layout].cp > 1
            truth = whole(found.plain, "cp2") if shared else want
            off = furthest(whole(answers, layout), truth, start)
            assert off[len(off) // 2] < middle and off[-1] < most, f"{numerics}, {layout}: {off}"


def check_refusals(found: Found) -> None:
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
