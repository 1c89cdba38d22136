"""Against transformers' own classes: shapes of each architecture, and what the comparison refuses."""

import sys
from io import StringIO
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from rich.console import Console

import unified_models as um
from unified_models.verify import Parity, against_transformers
from unified_models.verify.transformers import default_lengths, theirs
from unified_models.verify.transformers.choices import draw, margins
from unified_models.verify.transformers.deepseek_v4 import config as their_config
from unified_models.verify.transformers.parity import Gradient, Logits, compare_gradients
from unified_models.weight import Weight

CONFIGS = Path(__file__).parents[2] / "configs/tiny"
LIGHTNING = ["mamba", "moe", "mamba", "attention", "moe"]
"""The kinds of layers of Nemotron-3.5: no plain MLP."""
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4": ("deepseek_v4", {}),
    "deepseek_v4-hca8": ("deepseek_v4", {"compress_ratios": [0, 0, 4, 8, 4, 8, 0]}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-latent": ("nemotron_h", {"moe_latent_size": 48, "n_groups": 1}),
    "nemotron_h-q128": ("nemotron_h", {"chunk_size": 128, "layers_block_type": LIGHTNING}),
    "nemotron_h-mixed": ("nemotron_h", {"config": CONFIGS / "nemotron_h_mixed.json"}),
    "nemotron_h-limits-D12": ("nemotron_h", {"time_step_limit": [0.05, 0.5]}),
    "qwen3": ("qwen3", {}),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of transformers, about itself
@pytest.mark.parametrize("shape", [*SHAPES, "deepseek_v4-micro"])
def test_logits_and_gradients_agree(
    tmp_path: Path, shape: str, micro_sizes: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    name, overrides = SHAPES.get(shape, ("deepseek_v4", micro_sizes))
    um.make_tiny(name, tmp_path / "model", seed=1, **overrides)
    parity = against_transformers(tmp_path / "model")
    assert parity.ok, parity.problems()
    model = um.load(tmp_path / "model", numerics="float32")
    assert [one.length for one in parity.logits] == default_lengths(model)
    trained = [weight for _, weight in model.weights() if not weight.frozen]
    assert len(parity.gradients) == sum(w.shape[0] if is_stack(w) else 1 for w in trained)
    idle = [one.name for one in parity.gradients if not one.norm]
    assert all(".experts." in name for name in idle), "only an expert may go without a token"
    assert len(idle) < len(parity.gradients) / 10
    logits, gradient = parity.worst
    assert logits < 5e-5
    assert gradient < 1e-4
    assert f"{len(parity.gradients)} gradients within" in _text(parity)


def is_stack(weight: Weight) -> bool:
    """Whether a checkpoint holds the weight as one tensor an expert."""
    return weight.axes[0] == "experts"


@pytest.mark.filterwarnings("default")
def test_their_time_limits_are_seen_D12(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left as it is, transformers clamps time steps at a value of the initialisation."""
    pytest.importorskip("transformers")
    overrides: dict[str, Any] = {
        "layers_block_type": ["mamba", "moe"],
        "time_step_limit": [0.05, 0.5],
    }
    um.make_tiny("nemotron_h", tmp_path / "model", **overrides)
    assert against_transformers(tmp_path / "model", lengths=(20,)).ok
    monkeypatch.setattr(theirs, "TRANSLATIONS", {})
    (logits,) = against_transformers(tmp_path / "model", lengths=(20,)).logits
    assert logits.difference > 1e-2


def test_lengths_are_around_the_chunks_of_a_scan(micro: Any, hybrid: Any) -> None:
    assert default_lengths(micro) == [1, 5, 80, 300]
    assert default_lengths(hybrid) == [1, 5, 15, 16, 17, 33, 80, 300]


def _text(parity: Parity) -> str:
    console = Console(width=160, file=StringIO())
    console.print(parity.table())
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def test_without_transformers_one_line_says_what_to_install(
    micro_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match=r"pip install 'unified_models\[transformers\]'"):
        against_transformers(micro_folder)


def test_bounds_can_fail() -> None:
    parity = Parity("folder", 0, tokens=100, redrawn=6)
    parity.logits = [Logits(5, 6e-5), Logits(9, 4e-5)]
    parity.gradients = [Gradient("a", 1.0, 2e-4, 1e-4), Gradient("b", 1.0, 1e-5, 1e-4)]
    assert parity.problems() == [
        "logits at length 5: 6.00e-05, bound 5e-05",
        "gradient of a: 2.00e-04 of 1.00e+00, allowed 1.00e-04",
        "6 of 100 tokens drawn again, at most 5% allowed",
    ]
    assert Parity("folder", 0).problems() == ["0 logits and 0 gradients compared"]
    assert "folder against transformers" in _text(parity)


def test_gradients_are_compared_by_name() -> None:
    ours = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1e-9])}
    same, small = compare_gradients(ours, ours | {"frozen": torch.ones(1)})
    assert (same.difference, small.difference) == (0.0, 0.0)
    assert same.allowed == pytest.approx(1e-4 * 5**0.5 + 1e-6 * 5**0.5)
    assert small.allowed == pytest.approx(1e-6 * 5**0.5)
    with pytest.raises(ValueError, match="no gradient of 1: b"):
        compare_gradients(ours, {"a": ours["a"]})


def test_ratios_in_the_spelling_of_transformers() -> None:
    raw = {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 8, 0],
        "expert_dtype": "fp8",
    }
    assert their_config(raw) == {
        "num_hidden_layers": 3,
        "layer_types": [
            "sliding_attention",
            "compressed_sparse_attention",
            "heavily_compressed_attention",
        ],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    }
    kept = {"num_hidden_layers": 3, "compress_ratios": [0, 4, 128, 0]}
    assert their_config(kept) == kept
    with pytest.raises(ValueError, match=r"not \[8, 128\]"):
        their_config({"num_hidden_layers": 2, "compress_ratios": [8, 128]})


def test_close_choices_are_drawn_again(micro: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unified_models.verify.transformers.choices.MARGIN", 0.01)
    parity = Parity("folder", 0)
    ids = draw(micro, 60, Random(0), parity)
    assert parity.tokens == 60
    assert 0 < parity.redrawn < 60
    assert margins(micro, ids).min() >= 0.01
