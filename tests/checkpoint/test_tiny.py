"""Small random checkpoints."""

import hashlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from unified_models import checkpoint, registry, tiny
from unified_models.weight import Table, Weight


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_seed_decides_every_byte(toy: Any, tmp_path: Path) -> None:
    for i, seed in enumerate((0, 0, 1)):
        torch.manual_seed(i)
        tiny.make_tiny("toy", tmp_path / str(i), seed=seed)
    assert digest(tmp_path / "0") == digest(tmp_path / "1") != digest(tmp_path / "2")


def test_a_tensor_does_not_depend_on_what_else_there_is(toy: Any, tmp_path: Path) -> None:
    tiny.make_tiny("toy", tmp_path / "a")
    tiny.make_tiny("toy", tmp_path / "b", num_layers=1)
    a, b = (checkpoint.load(tmp_path / name) for name in "ab")
    assert len(a.blocks) == 2 and len(b.blocks) == 1
    assert torch.equal(a.blocks[0].proj.master, b.blocks[0].proj.master)
    assert not torch.equal(a.blocks[0].proj.master, a.blocks[1].proj.master)


def test_frozen() -> None:
    """Known numbers, on every machine: a checkpoint of a seed is a name for its bytes."""
    values = tiny.normal(torch.Size((3,)), tiny.stream(0, "embed"))
    assert values.view(torch.int32).tolist() == [1064917340, 1058700049, 1045958841]


def test_normal() -> None:
    values = tiny.normal(torch.Size((100_000,)), tiny.stream(3, "x")).double()
    assert abs(values.mean()) < 0.02 and abs(values.std() - 1) < 0.02
    assert abs(values.abs().gt(1).double().mean() - 0.3173) < 0.02 and values.abs().max() < 4.3


@pytest.mark.parametrize("name", sorted(registry.architectures()))
def test_nothing_hides_a_fault(tmp_path: Path, name: str) -> None:
    """No tensor is constant, no two are equal, norms are near 1, table rows name distinct experts."""
    tiny.make_tiny(name, tmp_path / "a")
    model = checkpoint.load(tmp_path / "a")
    assert model.load_report.changed == () and model.load_report.skipped == {}
    seen: dict[bytes, str] = {}
    for path, weight in model.weights():
        values = weight().value.detach()
        assert values.isfinite().all() and (values.numel() == 1 or values.std() > 0), path
        if weight.exact:
            assert values.ne(0).float().mean() > 0.99, path
        elif len(weight.shape) == 1 and weight.init != "bias":
            assert 0.7 < values.mean() < 1.3 and values.std() < 0.3, path
        raw = values.numpy().tobytes()
        assert seen.setdefault(raw, path) == path
    for path, table in model.tables():
        assert table.upper is not None and table.data.max() == table.upper - 1, path
        ordered = table.data.sort(dim=1).values
        assert (ordered[:, 1:] > ordered[:, :-1]).all(), path


@pytest.mark.parametrize("init", sorted(tiny.INITS))
def test_a_weight_may_choose(init: str) -> None:
    weight = Weight(None, 400, None, 256, init=init)
    values = tiny.INITS[init](weight.shape, tiny.stream(0, "w"))
    assert values.dtype == torch.float32 and values.shape == weight.shape
    mean, deviation = {
        "norm": (1, 0.2),
        "bias": (0, 0.5),
        "matrix": (0, 1 / 16),
        "vocab": (0, 3 / 16),
        "dt_bias": (-3.5, 1),
        "score_bias": (0, 0.1),
        "A_log": (0.5, 0.7),
        "input_scale": (0.012, 0.0024),
        "cache_scale": (0.01, 0.002),
    }[init]
    assert abs(values.mean() - mean) < 0.01 and abs(values.std() / deviation - 1) < 0.02


def test_a_table_needs_a_bound() -> None:
    with pytest.raises(AssertionError, match="no upper bound"):
        tiny.distinct(Table("vocab", 3, None, 2), tiny.stream(0, "t"))


def test_arguments(toy: Any, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"unknown architecture 'deepseek_v5'.*did you mean 'deepseek_v4'"
    ):
        tiny.make_tiny("deepseek_v5", tmp_path / "a")
    with pytest.raises(
        ValueError, match="unknown key 'hiden_size' = 64; did you mean 'hidden_size'"
    ):
        tiny.make_tiny("deepseek_v4", tmp_path / "a", hiden_size=64)
    tiny.make_tiny("toy", tmp_path / "a")
    with pytest.raises(ValueError, match="holds files already"):
        tiny.make_tiny("toy", tmp_path / "a")


def test_another_process_writes_the_same(toy: Any, tmp_path: Path) -> None:
    small = "num_hash_layers=1, num_hidden_layers=1"
    code = f"import unified_models as um; um.make_tiny('deepseek_v4', {str(tmp_path / 'a')!r}, 5, {small})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    tiny.make_tiny("deepseek_v4", tmp_path / "b", 5, num_hash_layers=1, num_hidden_layers=1)
    assert digest(tmp_path / "a") == digest(tmp_path / "b")
