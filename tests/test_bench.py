"""The bench, with small numbers: that it reports what it should, and nothing where a bit differs. Never how fast."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from unified_models import bench, cli
from unified_models.bench.clock import in_turn
from unified_models.bench.jobs import Job
from unified_models.verify import Comparison

SMALL = bench.Size(repeats=1, requests=2, steps=1, tokens=4, packs=1, length=128)


@pytest.fixture(scope="module")
def result() -> bench.Result:
    every_kind = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128]}
    return bench.run("deepseek_v4", SMALL, command="from a test", config=every_kind)


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


def test_conditions(found: dict[str, Any]) -> None:
    conditions = found["conditions"]
    assert conditions["command"] == "from a test"
    assert conditions["threads"] == 1
    assert all(conditions[key] for key in ("model", "numerics", "torch", "cpu", "cores", "python"))


def test_no_times_where_a_bit_differs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Job, "check", lambda *_: Comparison(9, 1, ((2, 0), 1, 2)))
    args = ["bench", "--repeats", "1", "--json", str(tmp_path / "b.json")]
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


def test_in_turn() -> None:
    seen: list[str] = []
    works = {name: lambda name=name: seen.append(name) or len(seen) for name in "ab"}
    assert in_turn(works, 2) == {"a": [3, 6], "b": [4, 5]}
    assert "".join(seen) == "ba" + "ab" + "ba", "a round to warm up, then there and back"


@pytest.mark.parametrize("name", ["repeats", "requests", "steps", "tokens", "packs", "length"])
def test_size_refuses(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} = 0; at least 1"):
        bench.Size(**{name: 0})
