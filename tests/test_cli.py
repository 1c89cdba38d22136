"""The command line: what it explains, what it prints, what it refuses, and with which exit status."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import unified_models as um
from unified_models import cli, demo, verify
from unified_models.registry import find
from unified_models.verify import Comparison, bits

CONFIGS = Path(__file__).parent.parent / "configs"
MIXED = CONFIGS / "tiny/nemotron_h_mixed.json"
COMMANDS = ("demo", "tiny", "inspect", "generate", "verify", "bench")
UNEQUAL = Comparison(3, 1, ((0,), 1, 2))


def run(*args: object) -> Result:
    """One call of the command line, on a wide terminal."""
    return CliRunner(env={"COLUMNS": "300"}).invoke(cli.app, [str(arg) for arg in args])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, made by the command."""
    path = tmp_path_factory.mktemp("cli") / "v4"
    result = run("tiny", "deepseek_v4", path, "--set", "num_hidden_layers=3", "--seed", 7)
    assert result.exit_code == 0, result.output
    return path


def test_help_lists_every_command() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert all(name in result.output for name in COMMANDS)
    assert run().output.strip() == result.output.strip(), "without a command, the help is shown"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_command_has_an_example(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"Example: unified-models {command} " in result.output


def test_help_imports_nothing_heavy() -> None:
    code = "import sys, unified_models.cli; sys.exit(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() in ("", "[]"), done.stderr


def test_tiny(folder: Path, tmp_path: Path) -> None:
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 3
    um.make_tiny("deepseek_v4", tmp_path / "same", seed=7, num_hidden_layers=3)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "same" / file.name).read_bytes(), file.name


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint with a scan and three number formats, made by the command from a file."""
    path = tmp_path_factory.mktemp("cli") / "hybrid"
    result = run("tiny", "nemotron_h", path, "--config", MIXED, "--seed", 7)
    assert result.exit_code == 0, result.output
    return path


def test_tiny_from_a_config(hybrid: Path, tmp_path: Path) -> None:
    wanted = find("nemotron_h").Config.from_json(json.loads(MIXED.read_text()))
    assert um.load(hybrid).config == wanted
    changed = tmp_path / "changed"
    options = ("--config", MIXED, "--set", "chunk_size=32", "--set", "time_step_limit=[0,Infinity]")
    result = run("tiny", "nemotron_h", changed, *options)
    assert result.exit_code == 0, result.output
    assert um.load(changed).config == dataclasses.replace(wanted, chunk_size=32)


def test_inspect_of_mixed_formats_D21(hybrid: Path) -> None:
    """One decision a tensor: its format, and what reads it."""
    every = run("inspect", hybrid, "--every", "--no-values")
    assert every.exit_code == 0, every.output
    lines = {line.split()[0]: line for line in every.stdout.splitlines() if " blocks." in line}
    mixer = "backbone.layers.{}.mixer.{}"
    for layer, name, format_ in (
        (0, "in_proj.weight", "fp8_tensor"),
        (1, "experts.7.down_proj.weight", "nvfp4"),
        (4, "shared_experts.up_proj.weight", "nvfp4"),
        (1, "gate.weight", "bfloat16"),
        (2, "conv1d.weight", "bfloat16"),
        (2, "A_log", "float32"),
        (3, "q_proj.weight", "bfloat16"),
    ):
        assert format_ in lines[mixer.format(layer, name)].split()


def test_inspect(folder: Path) -> None:
    result = run("inspect", folder)
    assert result.exit_code == 0
    assert "deepseek_v4" in result.output
    assert "layers.*.attn.wkv.weight" in result.output
    every = run("inspect", folder, "--every", "--no-values")
    assert "layers.2.attn.wkv.weight" in every.output


def test_inspect_of_what_does_not_load(folder: Path, tmp_path: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"num_hash_layers": 2}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    result = run("inspect", tmp_path, "--no-values")
    assert result.exit_code == 1
    assert "unused" in result.output


def generated(*args: object) -> list[dict[str, Any]]:
    result = run("generate", *args, "--json")
    assert result.exit_code == 0, result.output
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_generate_json(folder: Path) -> None:
    records = generated(folder, "--prompt", "1 2 3", "--prompt", "4,5", "--max-tokens", 5)
    assert [r["prompt"] for r in records] == [[1, 2, 3], [4, 5]]
    assert [len(r["ids"]) for r in records] == [5, 5]
    assert all(r["versions"] == [0] * 5 and r["reason"] == "length" for r in records)
    trained = um.logprobs(um.load(folder), [r["prompt"] + r["ids"] for r in records])
    for record, lps in zip(records, trained, strict=True):
        told = torch.tensor(record["logprobs"], dtype=torch.float32)
        assert bits(told, lps.detach()[len(record["prompt"]) - 1 :]) == Comparison(5, 0)


def test_generate_with_few_states_D23(hybrid: Path) -> None:
    """Requests wait for a place for their state, and sample the same."""
    prompts = [arg for i in range(3) for arg in ("--prompt", f"{i} 2 3 " * 6)]
    options = (hybrid, *prompts, "--max-tokens", 5)
    assert generated(*options, "--state-slots", 1) == generated(*options)
    told = run("generate", *options, "--state-slots", 2).stderr
    assert "1 had to wait for a place for their state" in told
    assert "wait" not in run("generate", *options).stderr


def test_generate_from_file(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('[1, 2, 3]\n\n{"prompt": [4, 5]}\n')
    options = (folder, "--max-tokens", 3, "--seed", 2)
    assert generated(*options, "--prompts", file) == generated(
        *options, "--prompt", "1 2 3", "--prompt", "4 5"
    )


def test_generate_for_reading(folder: Path) -> None:
    result = run("generate", folder, "--prompt", "1 2 3", "--max-tokens", 2, "--temperature", 0)
    assert result.exit_code == 0, result.output
    assert "1 2 3" in result.stdout
    assert "2 tokens sampled and 4 run in 2 steps" in result.output


def test_generate_stops(folder: Path) -> None:
    options = (folder, "--prompt", "1 2 3", "--max-tokens", 4)
    first = generated(*options)[0]["ids"][0]
    assert generated(*options, "--stop", first)[0]["reason"] == "stop"


def test_false_on_the_command_line_is_false(folder: Path) -> None:
    prompt = ("--prompt", "9 " * 40)
    options = (*prompt, *prompt, "--max-tokens", 1, "--max-sequences", 1)
    assert "32 found in the prefix cache" in run("generate", folder, *options).output
    without = run("generate", folder, *options, "--no-prefix-cache")
    assert "0 found in the prefix cache" in without.output


WRONG = {
    "unknown architecture": (["tiny", "deepseek", "{new}"], "unknown architecture 'deepseek'"),
    "unknown key": (["tiny", "deepseek_v4", "{new}", "--set", "x=1"], "unknown key 'x' = 1"),
    "key of the function": (["tiny", "nemotron_h", "{new}", "--set", "seed=1"], "key 'seed' = 1"),
    "contradiction": (
        ["tiny", "nemotron_h", "{new}", "--set", "num_hidden_layers=3"],
        "num_hidden_layers = 3, layers_given = 6",
    ),
    "another model": (
        ["tiny", "deepseek_v4", "{new}", "--config", str(MIXED)],
        f"{MIXED}: model_type = 'nemotron_h', not 'deepseek_v4'",
    ),
    "no config": (["tiny", "nemotron_h", "{new}", "--config", "{new}"], "no such file"),
    "a whole release": (
        ["tiny", "nemotron_h", "{new}", "--config", str(CONFIGS / "nemotron_3_nano_30b.json")],
        "31,577,940,288 parameters, and a tiny model has at most 1,000,000,000",
    ),
    "state slots": (
        ["generate", "{folder}", "--prompt", "1", "--state-slots", "0"],
        "state_slots must be an int of at least 1, got 0",
    ),
    "no assignment": (["tiny", "deepseek_v4", "{new}", "--set", "x"], "expected KEY=VALUE"),
    "folder in use": (["tiny", "deepseek_v4", "{folder}"], "holds files already"),
    "no checkpoint": (["inspect", "{new}"], "config.json: no such file"),
    "no prompt": (["generate", "{folder}"], "give --prompt or --prompts"),
    "no ids": (["generate", "{folder}", "--prompt", "1 two"], "'1 two'"),
    "empty prompt": (["generate", "{folder}", "--prompt", ""], "empty"),
    "no file": (["generate", "{folder}", "--prompts", "{new}"], "No such file"),
    "no JSON": (["generate", "{folder}", "--prompts", "{text}"], "line 2: not JSON"),
    "temperature": (["generate", "{folder}", "--prompt", "1", "--temperature", "-1"], "-1.0"),
    "vocabulary": (["generate", "{folder}", "--prompt", "1 512"], "512 is not in [0, 512)"),
    "numerics": (["generate", "{folder}", "--prompt", "1", "--numerics", "fp8"], "'fp8'"),
    "against": (["verify", "{folder}", "--against", "vll"], "'vll'"),
    "samples": (["demo", "--samples", "0"], "samples = 0"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_input_is_one_red_line(case: str, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("[1]\nnot JSON\n")
    places = {"folder": folder, "new": tmp_path / "new", "text": tmp_path / "text"}
    args, told = WRONG[case]
    args = [arg.format(**places) for arg in args]
    result = run(*args)
    assert result.exit_code == 2
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not result.stdout
    for debugged in (["--debug", *args], [*args, "--debug"]):
        assert isinstance(run(*debugged).exception, (ValueError, OSError))


class Verdict:
    """Stands in for a report."""

    def __init__(self, ok: bool) -> None:
        self.ok = ok

    def table(self) -> str:
        return "the table"

    def to_json(self) -> str:
        return "{}"


@pytest.mark.parametrize("ok", [True, False])
def test_verify(ok: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: dict[str, Any] = {}

    def verify_folder(folder: Path, **options: Any) -> Verdict:
        asked.update(options, folder=folder)
        return Verdict(ok)

    monkeypatch.setattr(verify, "verify_folder", verify_folder)
    options = ("--numerics", "float32", "--threads", 1, "--quick", "--seed", 3, "--tokens", 5)
    result = run("verify", tmp_path, *options, "--json", tmp_path / "r.json")
    assert result.exit_code == (0 if ok else 1)
    assert "the table" in result.stdout
    assert (tmp_path / "r.json").read_text() == "{}\n"
    assert asked == {
        "folder": tmp_path,
        "numerics": ["float32"],
        "threads": [1],
        "tokens": 5,
        "seed": 3,
        "quick": True,
        "device": "cpu",
    }


def test_verify_against_transformers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(verify, "against_transformers", lambda folder, seed: Verdict(seed == 3))
    args = ("verify", tmp_path, "--against", "transformers", "--seed")
    assert [run(*args, seed).exit_code for seed in (3, 4)] == [0, 1]


@pytest.mark.parametrize("exact", [UNEQUAL, Comparison(0, 0)])
def test_demo_fails(exact: Comparison, monkeypatch: pytest.MonkeyPatch) -> None:
    row = demo.Row(0, exact, Comparison(3, 0), 0.0, 0.5)
    monkeypatch.setattr(demo, "run", lambda *_: iter([row]))
    assert run("demo").exit_code == 1
