"""What `inspect` knows about a folder."""

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from unified_models import checkpoint


def printed(report: checkpoint.Report, **options: Any) -> str:
    out = io.StringIO()
    checkpoint.print_report(report, Console(file=out, width=200), **options)
    return out.getvalue()


@pytest.fixture
def folder(toy: Any, tmp_path: Path) -> Path:
    state = toy.tensors("fp8_float32", "mxfp4") | {"mtp.0.norm.weight": torch.zeros(3)}
    path: Path = toy.write(tmp_path / "checkpoint", state, shards=2)
    save_file({"a": torch.zeros(1)}, path / "stray.safetensors")
    return path


def test_d21_one_decision_for_every_tensor(toy: Any, folder: Path) -> None:
    report = checkpoint.describe(folder)
    state = toy.tensors("fp8_float32", "mxfp4")
    lines = {line.name: line for line in report.lines}
    assert len(lines) == len(report.lines) and set(lines) == {*state, "mtp.0.norm.weight"}
    expert = lines["layers.1.experts.3.w2.weight"]
    assert (expert.path, expert.format, expert.dtype) == ("blocks.1.down[3]", "mxfp4", "I8")
    assert (expert.shape, expert.size, expert.decision) == ((160, 16), 2560, "read")
    scale = lines["layers.0.proj.scale"]
    assert scale.decision == "scale of layers.0.proj.weight" and scale.format == "fp8_float32"
    assert lines["layers.0.gate.tid2eid"].format == "I64"
    assert lines["mtp.0.norm.weight"].decision == "skipped: draft head"
    assert lines["mtp.0.norm.weight"].path is None
    assert report.stray == ("stray.safetensors",) and report.problems == ()
    assert report.size == sum(t.numel() * t.dtype.itemsize for t in state.values()) + 12
    assert sum(report.formats.values()) == report.size - 12


def test_c10_changed_blocks_are_those_of_a_load(folder: Path) -> None:
    assert checkpoint.describe(folder).changed == checkpoint.load(folder).load_report.changed != ()
    assert checkpoint.describe(folder, values=False).changed == ()


def test_a_checkpoint_that_does_not_load_is_described(toy: Any, folder: Path) -> None:
    state = toy.tensors("fp8_ue8m0", "mxfp4")
    del state["layers.0.proj.scale"], state["head.weight"]
    state["layers.1.norm.weight"] = torch.zeros(7)
    state["layers.1.gate.tid2eid"][2, 1] = 999
    state["odd"] = torch.zeros(2)
    report = checkpoint.describe(toy.write(folder / "bad", state))
    told = "\n".join(report.problems)
    for part in (
        "missing (1): head.weight",
        "unused (1): odd",
        "layers.0.proj.weight is F8_E4M3 and its scale is missing",
        "layers.1.norm.weight is F32 (7,), expected (160,)",
        "layers.1.gate.tid2eid[2, 1] is 999, expected 0 to 383",
    ):
        assert part in told
    decisions = {line.name: line.decision for line in report.lines}
    assert decisions["odd"] == "unused"
    assert decisions["layers.0.proj.weight"] == decisions["layers.1.norm.weight"] == "refused"
    assert all(problem in printed(report) for problem in report.problems)


def test_printing(folder: Path) -> None:
    report = checkpoint.describe(folder)
    short, long = printed(report), printed(report, every_tensor=True)
    assert "layers.*.experts.*.w1.weight" in short and "8 x [32, 80]" in short
    assert "blocks.*.gate[*]" in short and "skipped: draft head" in short
    assert "file not read: stray.safetensors" in short
    assert "re-packed with other values: 2 fp8_float32 tensors, 8 of 8 blocks" in short
    assert "re-packed with other values: layers.0.proj.weight (fp8_float32): 4 of 4 blocks" in short
    assert all(line.name in long for line in report.lines)
    assert f"{len(report.lines)} tensors, {report.size:,} bytes" in long
    assert len(short.splitlines()) < 25 < len(long.splitlines())


def test_markup_in_names_is_text(toy: Any, tmp_path: Path) -> None:
    state = toy.tensors() | {"[bold]x[/bold]": torch.zeros(1)}
    report = checkpoint.describe(toy.write(tmp_path / "c", state))
    assert "[bold]x[/bold]" in printed(report)


def test_long_lists_of_changes_are_cut(toy: Any, tmp_path: Path) -> None:
    folder = toy.write(tmp_path / "c", toy.tensors("fp8_float32", "fp8_float32"))
    report = checkpoint.describe(folder)
    assert len(report.changed) == 2 + 2 * 3 * toy.E
    assert "... 14 more tensors" in printed(report)
    assert all(change.name in printed(report, every_tensor=True) for change in report.changed)
    assert "... 14 more tensors" in str(checkpoint.load(folder).load_report)
