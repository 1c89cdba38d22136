"""The verification of models that keep a scan's state: Nemotron-H in bf16, FP8 and NVFP4, with and without a latent
space, in chunks of 16 and of 128 tokens; and that it can fail."""

import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import unified_models as um
from unified_models.context.step import Step
from unified_models.engine.memory import StepMemory
from unified_models.training import logprobs
from unified_models.verify import control, default_lengths, verify_folder
from unified_models.verify.counters import Counters, chunks, filled
from unified_models.verify.schedule import KINDS, STREAM, Material
from unified_models.verify.watch import Progress, Watch, page_sizes

CONFIGS = Path(__file__).parents[2] / "configs/tiny"
EDGES = {edge + offset for edge in (16, 128, 256) for offset in (-1, 0, 1)}
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "bf16": ("nemotron_h", {}, ("deployed", "float32")),
    "mixed-q128": ("nemotron_h_mixed", {"chunk_size": 128}, ("deployed",)),
    "latent": ("nemotron_h_latent", {}, ("deployed",)),
}
"""Config file, what is different, and numerics to run."""
SCANS = ("folds_inside", "folds_across", "state_hits", "preempted_open", "waited_for_state")


@pytest.mark.slow(80)
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_tiny_checkpoint_is_exact_A09(tmp_path: Path, name: str) -> None:
    config, overrides, numerics = CHECKPOINTS[name]
    um.make_tiny("nemotron_h", tmp_path / name, config=CONFIGS / f"{config}.json", **overrides)
    report = verify_folder(tmp_path / name, numerics=numerics)
    Console(width=160).print(report.table())
    assert report.ok, list(report.problems())
    assert report.total.compared >= 20000
    assert report.total.unequal == 0
    for kind in KINDS:
        lengths = {key.length for key in report.cells if key.kind == kind.name}
        assert lengths == {STREAM} if kind.lengths else lengths >= EDGES, kind.name
    for key, cell in report.cells.items():
        assert cell.runs > 0, key
        assert cell.bits.compared == cell.expected, key
        assert cell.bits.compared > 0 or key.length < 2, key
    for one in SCANS:
        assert report.counts[one] > 0, one
    assert not {"windows_inside", "queries_above", "select_ties"} & set(report.counts)
    for line in report.controls.values():
        assert re.search(r"named 13 of 13, reached the logprobs: embed, rms_norm, ", line), line


@pytest.mark.parametrize("name", ["attend", "conv", "scan", "moe"])
def test_a_fault_is_named(hybrid_folder: Path, faulty: Any, name: str) -> None:
    """Of one unit in the last place, of one token, in steps of several sequences."""
    faulty(name, 13)
    report = small(hybrid_folder, "random cuts", (0, 1, 2, 41))
    (told,) = report.differences
    where = (
        rf"float32, random cuts: blocks\.\d\.mixer {name}, sequence 3 token 13: \d+ of \d+ unequal"
    )
    assert re.match(where, told), told
    assert not report.ok


def small(folder: Path, kind: str, lengths: tuple[int, ...], numerics: str = "float32") -> Any:
    """One kind of schedule, one turn."""
    kinds = [one for one in KINDS if one.name == kind]
    options: dict[str, Any] = {"numerics": (numerics,), "threads": (1,), "tokens": 0}
    return verify_folder(folder, kinds=kinds, lengths=lengths, progress=False, **options)


@pytest.mark.parametrize(
    ("kind", "numerics", "first"),
    [("random cuts", "deployed", 32), ("random cuts", "float32", 16), ("prefix", "float32", 16)],
)
def test_a_state_kept_in_16_bits_is_found_D01(
    hybrid_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, numerics: str, first: int
) -> None:
    """Deployed numerics round the state that a product takes, but not the one that is carried on: there it takes two
    chunks to see."""
    honest = StepMemory.keep_states

    def rounded(self: StepMemory, step: Step, slot: Any, new_UHPN: Tensor) -> None:
        honest(self, step, slot, new_UHPN.bfloat16().float())

    lengths = (3, 70, 71, 72, 73)
    assert small(hybrid_folder, kind, lengths, numerics).total.unequal == 0
    monkeypatch.setattr(StepMemory, "keep_states", rounded)
    report = small(hybrid_folder, kind, lengths, numerics)
    unequal = {key.length for key, cell in report.cells.items() if cell.bits.unequal}
    assert unequal
    assert unequal <= {*lengths[1:]}
    told = report.differences[0]
    where = (
        rf"{numerics}, {kind}: blocks\.0\.mixer scan, sequence \d token (\d+): \d+ of 128 unequal"
    )
    found = re.match(where, told)
    assert found, told
    assert int(found[1]) >= first


def test_control_names_every_kind_of_operator(hybrid: Any, draw: Any) -> None:
    result = control(hybrid, draw(41)[0])
    assert not list(result.faults())
    names = {injection.fault.call.operator for injection in result.injections}
    assert names == {
        *("embed", "linear", "conv", "scan", "attend", "choose", "moe"),
        *("rms_norm", "gated_norm", "relu2", "log_softmax", "time_step", "route_weights"),
    }
    assert all(injection.found for injection in result.injections)
    assert {injection.fault.call.operator for injection in result.reached} >= {"scan", "attend"}


def test_lengths_are_around_one_and_two_chunks(hybrid: Any) -> None:
    assert {15, 16, 17, 31, 32, 33} <= set(default_lengths(hybrid))
    assert chunks(hybrid) == [16]


def test_streams_run_one_sequence_in_three_ways_A09(hybrid: Any) -> None:
    """Steps are counted: the kind is what its name says. Every other turn it leaves out the last way."""
    (kind,) = (kind for kind in KINDS if kind.name == "streams")
    assert kind.lengths == (900,)
    assert kind.where(hybrid)
    random = Random(1)
    sequence = [random.randrange(512) for _ in range(230)]
    with torch.no_grad():
        (expected,) = logprobs(hybrid, [sequence])
    for turn, steps in ((0, [1, 3, 229]), (1, [1, 3])):
        watch = Watch(hybrid)
        scored = list(kind.run(Material([sequence], 0, turn), watch, random))
        assert [engine.stats.steps for engine in watch._engines] == steps
        assert len(scored) == len(steps)
        assert all(torch.equal(one.logprobs, expected) for one in scored)


def test_chunks_that_fill_up_are_counted_by_where_they_began() -> None:
    """Against a count of every token's chunk."""
    random, totals = Random(0), [0, 0]
    for _ in range(300):
        lengths = [random.randrange(0, 40) for _ in range(3)]
        past = [random.choice((0, 5, 16, 21)) for _ in range(3)]
        inside = across = 0
        for length, before in zip(lengths, past, strict=True):
            new = set(range(before, before + length))
            for end in (token for token in new if token % 16 == 15):
                whole = set(range(end - 15, end + 1)) <= new
                inside, across = inside + whole, across + (not whole)
        assert filled(Step.of(lengths, past), 16) == (inside, across)
        totals = [totals[0] + inside, totals[1] + across]
    assert min(totals) > 100


def test_progress_sees_who_gave_way_and_what_was_found_D05() -> None:
    counters = Counters()
    progress = Progress([16], counters)
    # Two begin; both go on; the second gives way amid a chunk and finds its first chunk; then an update.
    progress.add(Step.of([20, 20]), [0, 1], 0)
    progress.add(Step.of([3, 1], [20, 20]), [0, 1], 0)
    assert (counters.preempted_open, counters.state_hits) == (0, 0)
    progress.add(Step.of([1, 5], [23, 16]), [0, 1], 0)
    assert (counters.preempted_open, counters.state_hits) == (1, 1)
    progress.add(Step.of([24], [0]), [0], 1)
    assert (counters.preempted_open, counters.state_hits) == (1, 1)
    # One gives way at a boundary, and a third begins at one.
    progress.add(Step.of([8], [24]), [0], 1)
    progress.add(Step.of([8, 4], [0, 32]), [0, 2], 1)
    assert (counters.preempted_open, counters.state_hits) == (1, 2)
    with pytest.raises(AssertionError, match="17 tokens found in memory, with a chunk of 16"):
        progress.add(Step.of([8], [17]), [3], 1)


def test_pages_fit_what_the_model_remembers(hybrid: Any, micro: Any, toy: Any) -> None:
    assert page_sizes(hybrid) == [8, 16]
    assert page_sizes(micro) == page_sizes(toy) == [16, 32]
    assert (Watch(hybrid).page, Watch(micro).page) == (8, 16)
