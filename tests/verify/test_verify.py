"""The verification itself: it holds on a tiny DeepSeek-V4 with every demand met, and it can fail."""

import json
import re
from dataclasses import asdict
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rich.console import Console

from unified_models.verify import default_lengths, verify_folder
from unified_models.verify.counters import Counters, absent, cut_margins
from unified_models.verify.report import Cell, Key, Report
from unified_models.verify.schedule import KINDS, Kind, Material, Scored
from unified_models.verify.watch import Watch

SCANS = {"folds_inside", "folds_across", "state_hits", "preempted_open", "waited_for_state"}
"""Counters of what DeepSeek-V4 has not."""
ENGINES = {"preemptions", "updates", "prefix_hits", "mixed_steps"}
"""Counters of what every model has."""
TABLE = [kind for kind in KINDS if not kind.lengths]
DEMANDED = {*range(6), 7, 8, 127, 128, 129, 255, 256, 257, 300, 15, 16, 17}


@pytest.mark.slow(300)
def test_the_tiny_checkpoint_is_exact(tiny_folder: Path) -> None:
    report = verify_folder(tiny_folder)
    Console(width=160).print(report.table())
    assert report.ok, list(report.problems())
    assert report.total.compared >= 20000
    assert report.total.unequal == 0

    lengths = {key.length for key in report.cells}
    assert lengths >= DEMANDED
    wanted = {
        Key(numerics, threads, kind.name, length)
        for numerics in ("deployed", "float32")
        for threads in (1, 2)
        for kind in TABLE
        for length in lengths
    }
    assert set(report.cells) == wanted
    for key, cell in report.cells.items():
        assert cell.runs > 0, key
        assert cell.bits.compared == cell.expected, key
        assert cell.bits.compared > 0 or key.length < 2, key
        assert cell.gap.valid == cell.bits.compared
        assert cell.gap.max == cell.gap.mean == cell.gap.std == cell.gap.k3 == 0

    assert all(value > 0 for value in report.counts.values()), report.counts
    assert set(asdict(report.counters)) - set(report.counts) == SCANS
    for line in report.controls.values():
        assert "named 18 of 18, reached the logprobs: embed" in line
    written = json.loads(report.to_json())
    assert written["ok"]
    assert len(written["cells"]) == len(wanted)
    assert written["fingerprints"]["deployed"]["kernels"]


def small(folder: Path, **options: Any) -> Report:
    """A verification of few tokens."""
    defaults: dict[str, Any] = {
        "numerics": ("float32",),
        "threads": (1,),
        "tokens": 0,
        "lengths": (0, 1, 2, 17),
    }
    return verify_folder(folder, **(defaults | options))


@pytest.mark.slow
@pytest.mark.parametrize("kind", TABLE, ids=lambda kind: kind.name)
def test_a_fault_makes_every_kind_fail_and_is_named(
    micro_folder: Path, faulty: Any, kind: Kind
) -> None:
    faulty("attend_latent", 5)
    report = small(micro_folder, kinds=[kind], lengths=(0, 1, 2, 9, 17))
    assert not report.ok
    unequal = {key.length for key, cell in report.cells.items() if cell.bits.unequal}
    assert {17} <= unequal <= {1, 2, 9, 17}, "those that have a logprob after token 5"
    (told,) = report.differences
    where = rf"float32, {kind.name}: blocks\.0\.attention attend_latent, sequence \d token 5: 1\d\d of 128 unequal"
    assert re.match(where, told), told
    assert told in report.to_json()
    console = Console(width=300, file=StringIO())
    console.print(report.table())
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "NOT verified" in text
    assert f"first difference: {told}" in text
    assert (
        "control: without a fault, the sides part at blocks.0.attention attend_latent, sequence 0 token 5"
        in text
    )


def test_a_small_run_repeats_until_there_are_enough_tokens(micro_folder: Path) -> None:
    kinds = [kind for kind in KINDS if kind.name in ("alone", "packed")]
    report = small(micro_folder, kinds=kinds, lengths=(0, 1, 9), tokens=40)
    assert report.total.compared == 48
    assert report.total.unequal == 0
    assert report.cells[Key("float32", 1, "alone", 9)].runs == 3
    assert report.cells[Key("float32", 1, "alone", 0)].fault(0) is None
    assert "never met: preemptions" in list(report.problems())


def test_the_same_seed_runs_the_same_schedules(micro: Any) -> None:
    material = Material([[1, 2, 3], [4, 5], [6], []], 0, 1)
    for kind in KINDS:
        runs = []
        for _ in range(2):
            counters = Counters()
            watch = Watch(micro, counters, kind.base)
            scored = list(kind.run(material, watch, Random(3)))
            watch.finish()
            runs.append(
                (counters, [(one.number, one.sequence, one.logprobs.tolist()) for one in scored])
            )
        assert runs[0] == runs[1], kind.name
        assert {one.number for one in scored} == {0, 1, 2, 3}, kind.name


@pytest.mark.parametrize(
    "options",
    [{"numerics": ()}, {"threads": ()}, {"kinds": ()}, {"lengths": (0, 1)}, {"lengths": ()}],
)
def test_nothing_to_run_is_refused(micro_folder: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"nothing to run|lengths must reach 3 tokens"):
        small(micro_folder, **options)


def test_a_cell_without_tokens_fails() -> None:
    report = Report("folder", 0, 3)
    assert list(report.problems()) == ["0 tokens compared, 3 wanted"]
    lp = torch.tensor([-1.0, -2.0, -3.0])
    report.cells[Key("float32", 1, "alone", 4)].add(lp, lp)
    assert report.ok
    report.cells[Key("float32", 1, "alone", 1)].add(lp[:0], lp[:0])
    assert report.ok
    report.cells[Key("float32", 1, "alone", 5)].add(lp[:0], lp[:0])
    report.cells[Key("float32", 1, "alone", 6)] = Cell()
    report.demanded = True
    report.absent = set(asdict(report.counters)) - {"preemptions", "updates"}
    report.counters.updates = 1
    assert list(report.problems()) == [
        "float32, 1 thread(s), alone, length 5: 0 of 0 tokens were compared",
        "float32, 1 thread(s), alone, length 6: no sequence was run",
        "never met: preemptions",
    ]
    assert not report.ok


def test_scored_counts_its_tokens() -> None:
    with pytest.raises(ValueError, match="sequence 2: 4 tokens from token 1 on, and 3 logprobs"):
        Scored(2, [1, 2, 3, 4, 5], 1, torch.zeros(3))


def test_lengths_come_from_the_model(tiny: Any, micro: Any) -> None:
    assert set(default_lengths(tiny)) >= DEMANDED | {63, 64, 65}
    assert {31, 32, 33} - set(default_lengths(micro)) == {31, 32, 33}
    assert {7, 8, 9, 15, 16, 17} <= set(default_lengths(micro))


def test_margins_at_the_cut() -> None:
    inf = torch.inf
    scores = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 1.0], [5.0, -inf, -inf], [5.0, 4.0, -inf]])
    assert cut_margins(scores, 1).tolist() == [1.0, 0.0, inf, 1.0]
    assert cut_margins(scores, 2).tolist() == [1.0, 0.0, inf, inf]
    assert cut_margins(scores, 3).tolist() == [inf] * 4


def test_counters_are_of_what_the_model_has(micro: Any, toy: Any) -> None:
    names = set(asdict(Counters()))
    assert absent(micro, {"select", "choose", "expert_rows"}) == SCANS
    assert "select_ties" in absent(micro, {"choose"})
    assert absent(toy, set()) == names - ENGINES
    assert Counters(updates=2).without(names - {"updates"}) == {"updates": 2}
