"""What the README and CONTRIBUTING say is so: the example runs, and what they point at is there."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from unified_models import cli

ROOT = Path(__file__).parent.parent
PAGES = ["README.md", "CONTRIBUTING.md"]


def test_readme_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use it and train it, in the order of the page and in ten lines each; tests/adapters/vllm runs serve it."""
    use, serve, train = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL
    )
    assert "from vllm import" in serve
    monkeypatch.chdir(tmp_path)
    for example in (use, train):
        assert "assert" in example
        exec(compile(example, "README.md", "exec"), {})
    for example in (use, serve, train):
        lines = [line for line in example.splitlines() if line and "import" not in line]
        assert len(lines) <= 10


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", (ROOT / page).read_text())
    assert links
    assert not [link for link in links if not (ROOT / link).exists()]


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    named = set(
        re.findall(r"\bmake (demo|test|lint|bench|clean|setup)\b", (ROOT / page).read_text())
    )
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert named
    assert named <= targets


def test_commands_and_options_exist() -> None:
    lines = re.findall(
        r"^unified-models (\w+)(.*)$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len({command for command, _ in lines}) == len(cli.app.registered_commands)
    told = [(command, option) for command, rest in lines for option in re.findall(r"--\w+", rest)]
    assert ("bench", "--scan") in told
    for command, option in told:
        shown = CliRunner(env={"COLUMNS": "200"}).invoke(cli.app, [command, "--help"])
        assert shown.exit_code == 0 and option in shown.output, (command, option)
