"""The bench, with small numbers: that it reports what it should, and nothing where a bit differs. Never how fast."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from unified_models import bench, cli
from unified_models.bench import products, scan
from unified_models.bench.clock import in_turn
from unified_models.bench.jobs import Job
from unified_models.bench.scan import CHUNKS, MANY, SPAN, WIDTHS, Rows, Scans, Widths, run_scan
from unified_models.ops.scan.reference import scan as recurrence
from unified_models.verify import Comparison

TINY = WIDTHS[0]
SMALL = bench.Size(repeats=1, requests=2, steps=1, tokens=4, packs=1, length=128)


@pytest.fixture(scope="module")
def result() -> bench.Result:
    every_kind = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    return bench.run("deepseek_v4", SMALL, command="from a test", config=every_kind)


@pytest.fixture(scope="module")
def hybrid() -> bench.Result:
    return bench.run("nemotron_h", SMALL)


@pytest.fixture(scope="module")
def scanned() -> bench.ScanResult:
    return run_scan(TINY, repeats=1, chunks=(16, 64), command="from a test")


@pytest.fixture(scope="module")
def found(result: bench.Result) -> dict[str, Any]:
    text = json.dumps(result.as_dict())
    return json.loads(text)  # type: ignore[no-any-return]


def test_gate(found: dict[str, Any]) -> None:
    jobs = found["jobs"].values()
    assert found["gate"] == {"compared": sum(job["tokens"] for job in jobs), "unequal": 0}


def test_speeds(found: dict[str, Any]) -> None:
    speeds = found["speeds"]
    assert list(speeds) == [
        "decode, 1 request",
        "decode, 2 requests",
        "prefill",
        "training, forward",
        "training, forward and backward",
    ]
    for speed in speeds.values():
        assert speed["tokens"] > 0
        assert 0 < speed["lowest"] <= speed["tokens_per_second"] <= speed["highest"]
        assert len(speed["seconds"]) == SMALL.repeats
    assert found["decode_ratio"] > 0
    assert 0 < found["engine_overhead"] < 1


def test_memory(found: dict[str, Any]) -> None:
    jobs = found["jobs"]
    for kind in ("shared prefix", "little memory"):
        with_cache, without = jobs[f"{kind}, cache"], jobs[f"{kind}, no cache"]
        assert with_cache["prefix_hits"] > 0, "tokens that were not run again"
        assert without["prefix_hits"] == 0
        assert with_cache["tokens_run"] < without["tokens_run"]
    assert jobs["little memory, no cache"]["preemptions"] > 0
    assert jobs["little memory, no cache"]["tokens_recomputed"] > 0


def test_models_with_a_scan_wait_for_states(hybrid: bench.Result) -> None:
    found = hybrid.as_dict()
    jobs = found["jobs"]
    assert found["gate"] == {"compared": sum(job["tokens"] for job in jobs.values()), "unequal": 0}
    assert jobs["few states"]["waited_for_state"] > 0
    assert jobs["little memory, no cache"]["preemptions"] > 0
    assert jobs["shared prefix, cache"]["prefix_hits"] > 0
    others = [job["waited_for_state"] for name, job in jobs.items() if name != "few states"]
    assert others and not any(others)


def test_conditions(found: dict[str, Any]) -> None:
    conditions = found["conditions"]
    assert conditions["command"] == "from a test"
    assert conditions["threads"] == 1
    assert all(conditions[key] for key in ("model", "numerics", "torch", "cpu", "cores", "python"))


def test_no_times_where_a_bit_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Job, "check", lambda *_: Comparison(9, 1, ((2, 0), 1, 2)))
    args = ["bench", "--architecture", "nemotron_h", "--json", str(tmp_path / "b.json")]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, args)
    assert result.exit_code == 1
    assert "no times" in result.output
    assert "per second" not in result.output
    (told,) = json.loads((tmp_path / "b.json").read_text())
    assert told["gate"]["unequal"] > 0
    assert "speeds" not in told


def test_command(monkeypatch: pytest.MonkeyPatch, result: bench.Result, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "run", lambda *_, **__: result)
    args = ["bench", "--architecture", "deepseek_v4", "--json", str(tmp_path / "b.json")]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, args)
    assert shown.exit_code == 0, shown.output
    assert "decode, 2 requests" in shown.output
    assert "torch" in shown.output
    assert json.loads((tmp_path / "b.json").read_text()) == [result.as_dict()]


def test_scan(scanned: bench.ScanResult) -> None:
    assert scanned.ok
    rows, values = 1 + MANY, TINY.heads * TINY.head_dim
    assert scanned.gate == Comparison(2 * rows * values, 0, bytes=scanned.gate.bytes)
    found = json.loads(json.dumps(scanned.as_dict()))
    assert [cost["chunk"] for cost in found["costs"]] == [16, 64]
    for cost in found["costs"]:
        for name in ("row, 1 sequence", f"row, {MANY} sequences", "whole chunks"):
            assert cost[name]["seconds"] > 0
            assert len(cost[name]["every"]) == 1
    assert found["conditions"]["command"] == "from a test"
    assert set(found["growth"]) == {
        "a row, 1 sequence",
        f"a row, {MANY} sequences",
        "the whole chunk",
    }


@pytest.mark.parametrize("widths", WIDTHS, ids=lambda widths: widths.name)
def test_row_of_a_scan_costs_no_square(widths: Widths) -> None:
    """The products of one tile: with the state, and with each row of the chunk; a chunk has Q of those rows."""
    H, P, N, G = widths.heads, widths.head_dim, widths.state_size, widths.groups
    rows = Rows.random(widths, 0)
    counted = []
    for chunk in CHUNKS:
        states = torch.zeros(1, H, P, N)
        counted.append(scan.multiply_adds(Scans.of(rows, widths, chunk), states))
    assert counted == [16 * (H * N * P + Q * (G * N + H * P)) for Q in CHUNKS]
    assert all(SPAN % Q == 0 for Q in CHUNKS) and len(CHUNKS) == 5


def test_scan_is_the_recurrence() -> None:
    """What is timed computes what it should: bfloat16 weights and states, sums of up to 256 terms."""
    rows = Rows.random(TINY, 1)
    for chunk in (16, 256):
        y_THP, _ = Scans.of(rows, TINY, chunk).whole(2)
        parts = (rows.x_STHP[2], rows.dt_STH[2], rows.b_STGN[2], rows.c_STGN[2])
        wanted = recurrence(*(part.double() for part in (*parts, rows.a_H, rows.skip_H)))
        assert float((y_THP - wanted).norm()) < 0.01 * float(wanted.norm())


def test_no_times_of_a_scan_where_a_bit_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = Scans.decode

    def faulty(scans: Scans, states: torch.Tensor) -> torch.Tensor:
        y = decode(scans, states)
        if len(y) > 1:
            y[3, 2, 1] = torch.nextafter(y[3, 2, 1], torch.zeros((), dtype=y.dtype))
        return y

    monkeypatch.setattr(Scans, "decode", faulty)
    monkeypatch.setattr(scan, "WIDTHS", (TINY,))
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, ["bench", "--scan"])
    assert result.exit_code == 1
    assert "no times" in result.output and "first at [3, 2, 1]" in result.output
    assert "microseconds" not in result.output


def test_command_scan(
    monkeypatch: pytest.MonkeyPatch, scanned: bench.ScanResult, tmp_path: Path
) -> None:
    monkeypatch.setattr(bench, "scan_results", lambda *_, **__: iter([scanned]))
    args = ["bench", "--scan", "--json", str(tmp_path / "b.json")]
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, args)
    assert shown.exit_code == 0, shown.output
    assert "Q 64 against 16: a row takes" in shown.output
    assert "linear growth would be 4, quadratic 16" in shown.output
    assert json.loads((tmp_path / "b.json").read_text()) == [scanned.as_dict()]


def test_in_turn() -> None:
    seen: list[str] = []
    works = {name: lambda name=name: seen.append(name) or len(seen) for name in "ab"}
    assert in_turn(works, 2) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(seen) == "ba" + "ab" + "ba", "a round to warm up, then there and back"


@pytest.mark.parametrize("name", ["repeats", "requests", "steps", "tokens", "packs", "length"])
def test_size_refuses(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0; at least 1"):
        bench.Size(**{name: 0})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU; tests/gpu runs it")
def test_products_need_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert products.main() == 2
    assert "needs a GPU" in capsys.readouterr().err
