"""Training's bench at a tiny size, on the CPU: that both sides train the same model, and what is refused. Never how
fast."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import unified_models as um
from unified_models import cli
from unified_models.bench import training
from unified_models.bench.training import Side, Task, main, ours, theirs
from unified_models.verify.transformers.nemotron_h import prepare

CONFIGS = Path(__file__).parents[1] / "configs"
TINY = CONFIGS / "tiny/nemotron_h.json"
CUT = ("hybrid_override_pattern=MEM*EME", "num_hidden_layers=7")
SMALL = (".tokens=48", ".repeats=1")
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("default")  # of transformers, about itself


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def told_by(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> dict[str, Any]:
    """The line of JSON that a side ends with."""
    capsys.readouterr()
    assert main([*arguments, *SMALL]) == status
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Why nothing was run."""
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert not out and len(err.splitlines()) == 1
    return err


def test_both_sides_train_the_same_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    mine, other = (told_by(capsys, side, str(TINY)) for side in ("ours", "transformers"))
    for told in (mine, other):
        assert told["forward_tokens_per_second"] > 0
        assert told["forward_backward_tokens_per_second"] > 0
        assert len(told["forward_milliseconds"]) == 1
        assert told["gradients"] == told["parameters"] > 100_000
        assert told["loss"] == pytest.approx(6.24, abs=0.2), "about the log of 512"
        assert told["tokens"] == 48 and told["layers"] == 6 and told["torch"]
        assert told["forward_peak_gib"] is None, "of a GPU alone"
    assert mine["parameters"] == other["parameters"]
    assert other["class"] == "NemotronHForCausalLM"
    assert (other["attention"], other["experts"]) == ("sdpa", "grouped_mm")
    assert other["kernels"]["mamba2_split_conv1d_scan_combined"] == "torch"


def test_both_sides_have_one_loss(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    task = Task.of("both", TINY, [".tokens=200"])
    mine, other = ours(task, CPU), theirs(task, CPU)
    um.save(mine.model, tmp_path / "model")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    prepare(read)
    before = float(other.forward())
    other.model.load_state_dict(read.state_dict())
    after, wanted = float(other.forward()), float(mine.forward())
    assert after == pytest.approx(wanted, rel=1e-3)
    assert before != pytest.approx(wanted, rel=1e-4), "not by chance"


@pytest.mark.parametrize("side", ["ours", "transformers"])
def test_fewer_layers_of_a_release(side: str) -> None:
    """The pattern decides on both sides; widths are made small here."""
    if side == "transformers":
        pytest.importorskip("transformers")
    narrow = {
        "hidden_size": 64,
        "vocab_size": 96,
        "n_routed_experts": 8,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 48,
        "head_dim": 16,
        "num_attention_heads": 4,
    }
    texts = [*CUT, *(f"{key}={value}" for key, value in narrow.items()), ".tokens=24"]
    task = Task.of(side, CONFIGS / "nemotron_3_nano_30b.json", texts)
    made = training.SIDES[side](task, CPU)
    assert made.told["layers"] == 7
    if side == "transformers":
        kinds = [block.block_type for block in made.model.model.layers]  # type: ignore[union-attr]
        assert [kind[0] for kind in kinds] == list("lmlfmlm")
    made.step()
    assert all(p.grad is not None for p in made.trained)


@pytest.mark.parametrize("side", ["ours", "transformers"])
def test_checkpoint_keeps_the_gradients(side: str) -> None:
    if side == "transformers":
        pytest.importorskip("transformers")
    found = []
    for checkpoint in ("false", "true"):
        torch.manual_seed(0)
        texts = [".tokens=32", f".checkpoint={checkpoint}"]
        made = training.SIDES[side](Task.of(side, TINY, texts), CPU)
        made.step()
        found.append([p.grad for p in made.trained])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_profile_and_several_sequences(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["ours", str(TINY), *SMALL, ".sequences=3", ".profile=true", ".masters=float32"]
    assert main(arguments) == 0
    *profile, last = capsys.readouterr().out.splitlines()
    assert "while profiled" in profile[0] and len(profile) > 10
    told = json.loads(last)
    assert (told["sequences"], told["masters"]) == (3, "float32")


def test_out_of_memory_is_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: Side) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 69.00 GiB.\nmore")

    monkeypatch.setattr(Side, "step", full)
    assert main(["ours", str(TINY), *SMALL]) == 1
    out, err = capsys.readouterr()
    assert err == "ours: out of memory: CUDA out of memory. Tried to allocate 69.00 GiB.\n"
    told = json.loads(out)
    assert told["forward_tokens_per_second"] > 0
    assert "forward_backward_tokens_per_second" not in told


def test_both(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each side twice, by name; a run without numbers is a dash, and a failure."""
    pytest.importorskip("transformers")
    commands = []

    class Ran:
        def __init__(self, command: Sequence[str], **_: object) -> None:
            commands.append(command)
            rate = 1500.0 if command[3] == "ours" else 3000.0
            failed = len(commands) == 4
            self.returncode = int(failed)
            told = {} if failed else {"forward_tokens_per_second": rate}
            self.stdout = f"a line of a profile\n{json.dumps(told)}\n"

    monkeypatch.setattr(training.subprocess, "run", Ran)
    assert main(["both", str(TINY), *SMALL]) == 1
    assert [command[3] for command in commands] == ["transformers", "ours", "ours", "transformers"]
    assert all(command[4:] == [str(TINY), *SMALL] for command in commands)
    out, err = capsys.readouterr()
    assert err.strip() == "transformers: exit status 1"
    (row,) = (line for line in out.splitlines() if "forward, tokens" in line)
    assert [cell.strip() for cell in row.split("│")[2:5]] == ["3,000 -", "1,500 1,500", "0.50"]


@pytest.mark.parametrize(
    ("texts", "why"),
    [
        ([".token=5"], "unknown option .token; known: .tokens, .sequences"),
        ([".tokens=many"], ".tokens = 'many'; expected int"),
        ([".tokens=100", ".sequences=3"], ".tokens = 100 in .sequences = 3: not in equal parts"),
        ([".tokens=4", ".sequences=4"], "at least 2 tokens each"),
        ([".repeats=0"], ".repeats = 0; at least 1"),
        ([".masters=float16"], ".masters = 'float16'; known: bfloat16, float32"),
        (["hidden_sizes=3"], "hidden_sizes"),
        (["model_type=nemotron"], "did you mean 'nemotron_h'?"),
        (["tokens"], "expected KEY=VALUE"),
    ],
)
def test_refuses(capsys: pytest.CaptureFixture[str], texts: list[str], why: str) -> None:
    assert why in refused(capsys, "ours", str(TINY), *texts)


def test_refuses_the_rest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    assert "expected ours|transformers|both CONFIG" in refused(capsys, "mine", str(TINY))
    assert "expected ours|transformers|both CONFIG" in refused(capsys, "ours")
    assert "no such file" in refused(capsys, "ours", str(tmp_path / "config.json"))
    for side in ("transformers", "both"):
        assert "takes no packs" in refused(capsys, side, str(TINY), ".sequences=2")


def test_the_command_runs_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def run(command: list[str]) -> Any:
        calls.append(command[1:])
        return subprocess.CompletedProcess(command, 1)

    monkeypatch.setattr(cli.subprocess, "run", run)
    given = [
        "bench",
        "--training",
        str(TINY),
        "--set",
        ".tokens=48",
        "--set",
        "num_hidden_layers=6",
    ]
    assert CliRunner().invoke(cli.app, given).exit_code == 1, "what the child ended with"
    assert calls == [
        ["-m", training.__name__, "both", str(TINY), ".tokens=48", "num_hidden_layers=6"]
    ]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (["--set", "num_hidden_layers=6"], "--set 'num_hidden_layers=6'"),
        (["--training", str(TINY), "--json", "b.json"], "--json b.json"),
    ],
)
def test_the_command_refuses_what_it_would_not_do(given: list[str], why: str) -> None:
    result = CliRunner().invoke(cli.app, ["bench", *given])
    assert result.exit_code == 2 or isinstance(result.exception, ValueError)
    assert why in (result.output + str(result.exception))
