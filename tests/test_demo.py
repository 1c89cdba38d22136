"""The demo, with small numbers: what it compares, what it reports, and that its updates are real."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from unified_models import cli, registry
from unified_models.demo import Demo, Row, Settings, filled, make_prompts, make_samplings, run
from unified_models.engine import Output
from unified_models.registry import find
from unified_models.verify import Comparison

SMALL = Settings(samples=1, tokens=6, updates=2)


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    return list(run("deepseek_v4", tmp_path_factory.mktemp("demo") / "m", SMALL))


def test_every_rollout_is_exact(rows: list[Row]) -> None:
    tokens = sum(sampling.max_tokens for sampling in make_samplings(4, 0, SMALL))
    assert [row.version for row in rows] == [0, 1, 2]
    assert [row.exact for row in rows] == [Comparison(tokens, 0)] * 3
    assert [row.plain.compared for row in rows] == [tokens] * 3
    assert all((row.apart > 0) == (row.plain.unequal > 0) for row in rows)
    assert all(0 <= row.reward <= 1 for row in rows)


def test_report(rows: list[Row]) -> None:
    shown = Demo("deepseek_v4", rows)
    assert shown.ok
    story = shown.story()
    assert f"sampled {sum(row.exact.compared for row in rows)} tokens under 3 versions" in story
    assert f"from {rows[0].reward:.3f} to {rows[-1].reward:.3f}" in story
    assert shown.table().row_count == 3


@pytest.mark.parametrize("name", registry.architectures())
def test_command(name: str) -> None:
    args = ["demo", "--architecture", name, "--samples", "1", "--tokens", "3", "--updates", "1"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, args)
    assert result.exit_code == 0, result.output
    assert name in result.output
    assert "reward" in result.output
    assert "version 1" in result.output


def test_prompts_and_chunks() -> None:
    """Rollouts of every prompt fill a chunk of 16 while they sample: a state moves by rows and by whole chunks."""
    settings = Settings()
    prompts = make_prompts(512, settings)
    samplings = make_samplings(len(prompts), 0, settings)
    outs = [Output([0] * s.max_tokens, torch.zeros(0), [], "length") for s in samplings]
    model = find("nemotron_h").Model(find("nemotron_h").Config.tiny())
    crossed = {}
    for prompt, out in zip(prompts, outs, strict=True):
        run_rows = range(len(prompt), len(prompt) + len(out.ids) - 1)
        full = sum((position + 1) % 16 == 0 for position in run_rows)
        assert filled(model, [prompt], [out]) == full
        crossed[len(prompt)] = crossed.get(len(prompt), 0) + full
    assert filled(model, prompts, outs) == sum(crossed.values())
    assert len(crossed) == 4 and min(crossed.values()) > 0, crossed
    other = find("deepseek_v4")
    assert filled(other.Model(other.Config.tiny()), prompts, outs) == 0


def test_nemotron_h(tmp_path: Path) -> None:
    rows = list(run("nemotron_h", tmp_path / "m", Settings(samples=2, tokens=20, updates=1)))
    assert [row.exact.unequal for row in rows] == [0, 0]
    assert all(row.exact.compared > 50 and row.chunks > 0 for row in rows)
    assert all(row.plain.unequal > row.plain.compared // 2 for row in rows), "decode by recurrence"
    assert rows[1].reward != rows[0].reward
    story = Demo("nemotron_h", rows).story()
    assert f"filled {sum(row.chunks for row in rows)} chunks of the scan" in story
    assert "chunks of the scan" not in Demo("m", [replace(row, chunks=0) for row in rows]).story()


def test_not_ok() -> None:
    good, bad = Comparison(2, 0), Comparison(2, 1, ((0,), 1, 2))
    for exact, ok in ((good, True), (bad, False), (Comparison(0, 0), False)):
        assert Demo("m", [Row(0, good, bad, 1.0, 0.0), Row(1, exact, bad, 1.0, 0.0)]).ok is ok
    assert not Demo("m", []).ok, "nothing was shown"


def test_samplings() -> None:
    settings = Settings(samples=4, tokens=32)
    samplings = [make_samplings(16, version, settings) for version in (0, 1)]
    lengths = [[s.max_tokens for s in each] for each in samplings]
    assert sorted(lengths[0]) == list(range(2, 33, 2))
    assert lengths[0] == lengths[1]
    assert len({s.seed for each in samplings for s in each}) == 32, "other draws everywhere"
    prompts = make_prompts(512, settings)
    assert [prompts.count(prompt) for prompt in prompts] == [4] * 16


@pytest.mark.parametrize("wrong", [{"samples": 0}, {"tokens": 0}, {"updates": -1}, {"lr": 0.0}])
def test_settings_refuse(wrong: dict[str, float]) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(ValueError, match=rf"{name} = {value}"):
        Settings(**wrong)  # type: ignore[arg-type]


def test_folder_must_be_new(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="holds files already"):
        next(run("deepseek_v4", tmp_path, SMALL))
