"""The demo, with small numbers: what it compares, what it reports, and that its updates are real."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from unified_models import cli, registry
from unified_models.demo import Demo, Row, Settings, make_prompts, make_samplings, run
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
