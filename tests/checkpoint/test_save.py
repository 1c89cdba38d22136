"""Saving: official names and layouts, whole or not at all, and no byte moves in a round trip."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from unified_models import checkpoint
from unified_models.checkpoint import shards

KINDS = (
    "bfloat16",
    "fp8_ue8m0",
    "fp8_float32",
    "mxfp4",
    "fp8_tensor",
    "nvfp4",
    "nvfp4_four_over_six",
)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors(folder: Path) -> dict[str, Tensor]:
    out: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        out |= load_file(path)
    return out


@pytest.mark.parametrize("linear", ["bfloat16", "fp8_ue8m0", "mxfp4"])
@pytest.mark.parametrize("experts", ["bfloat16", "fp8_ue8m0", "mxfp4"])
def test_save_load_save_is_byte_identical(
    toy: Any, loaded: Any, tmp_path: Path, linear: str, experts: str
) -> None:
    model = loaded(toy.tensors(linear, experts))
    for _, weight in model.weights():
        weight.assign(torch.randn(weight.shape))
    checkpoint.save(model, tmp_path / "one")
    again = checkpoint.load(tmp_path / "one")
    assert again.load_report.changed == ()
    for (path, a), (_, b) in zip(model.weights(), again.weights(), strict=True):
        assert torch.equal(a().value, b().value), path
    for number, source in enumerate(({}, {"weights": "file"}, {"numerics": "float32"})):
        checkpoint.save(checkpoint.load(tmp_path / "one", **source), tmp_path / str(number))
        assert files(tmp_path / str(number)) == files(tmp_path / "one"), source


def test_float_scales_are_saved_as_they_are(toy: Any, loaded: Any, tmp_path: Path) -> None:
    model = loaded(toy.tensors("fp8_float32"))
    checkpoint.save(model, tmp_path / "one")
    saved = tensors(tmp_path / "one")
    packed = model.blocks[0].proj().packed
    assert torch.equal(saved["layers.0.proj.weight"].view(torch.uint8), packed["codes"])
    assert torch.equal(saved["layers.0.proj.scale"], packed["scales"])


@pytest.mark.parametrize("kind", KINDS)
def test_f15_a_server_saves_the_file_it_read(
    toy: Any, loaded: Any, tmp_path: Path, same: Callable[..., bool], kind: str
) -> None:
    state = toy.tensors(kind, kind)
    checkpoint.save(loaded(state, weights="file"), tmp_path / "one")
    saved = tensors(tmp_path / "one")
    assert saved.keys() == state.keys()
    assert all(same(saved[name], state[name]) for name in state)


@pytest.mark.parametrize("kind", KINDS)
def test_official_names_dtypes_and_config(toy: Any, loaded: Any, tmp_path: Path, kind: str) -> None:
    state = toy.tensors(kind, kind)
    model = loaded({f"model.{name}": t for name, t in state.items()}, config={"linear": kind})
    checkpoint.save(model, tmp_path / "one")
    saved = tensors(tmp_path / "one")
    assert {name: (t.dtype, t.shape) for name, t in saved.items()} == {
        name: (t.dtype, t.shape) for name, t in state.items()
    }
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    assert config["model_type"] == "toy" and config["linear"] == kind


@pytest.mark.parametrize("most", [1, 20_000, 100_000])
def test_sharding(toy: Any, loaded: Any, tmp_path: Path, most: int) -> None:
    model = loaded(toy.tensors("fp8_ue8m0", "mxfp4"))
    checkpoint.save(model, tmp_path / "one", max_shard_bytes=most)
    checkpoint.save(model, tmp_path / "whole")
    index = json.loads((tmp_path / "one" / shards.INDEX).read_text())
    weight_map = index["weight_map"]
    count = len(set(weight_map.values()))
    assert count > 1 and set(weight_map.values()) == {
        p.name for p in (tmp_path / "one").glob("*.safe*")
    } - {shards.INDEX}
    assert f"model-00001-of-{count:05}.safetensors" in weight_map.values()
    saved = tensors(tmp_path / "one")
    assert index["metadata"]["total_size"] == sum(
        t.numel() * t.dtype.itemsize for t in saved.values()
    )
    for name, file in weight_map.items():
        assert weight_map.get(name.replace(".weight", ".scale"), file) == file, (
            "a pair stays together"
        )
    for file in set(weight_map.values()):
        held = [saved[name] for name in weight_map if weight_map[name] == file]
        size = sum(t.numel() * t.dtype.itemsize for t in held)
        assert size <= most or len(held) <= 2
    checkpoint.save(checkpoint.load(tmp_path / "one"), tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "whole")


def test_f17_masters_come_back_to_the_bit(
    toy: Any, loaded: Any, tmp_path: Path, same: Callable[..., bool]
) -> None:
    model = loaded(toy.tensors("fp8_ue8m0", "mxfp4"))
    for _, weight in model.weights():
        weight.assign(torch.randn(weight.shape))
    checkpoint.save(model, tmp_path / "one", masters=True, max_shard_bytes=100_000)
    assert {t.dtype for t in tensors(tmp_path / "one").values()} == {torch.float32, torch.int64}
    again = checkpoint.load(tmp_path / "one")
    assert again.load_report.changed == ()
    for (path, a), (_, b) in zip(model.weights(), again.weights(), strict=True):
        assert same(a.master, b.master) and a.format is b.format, path
        assert all(same(a().packed[name], b().packed[name]) for name in a.packed_names), path


def test_masters_need_masters(toy: Any, loaded: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="masters=True, but embed holds packed bytes only"):
        checkpoint.save(loaded(toy.tensors(), weights="file"), tmp_path / "one", masters=True)


def test_metadata_of_masters_that_is_no_json_is_named(toy: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    folder = toy.write(tmp_path / "one", toy.tensors())
    save_file(toy.tensors(), folder / "model.safetensors", metadata={"unified_models.formats": "{"})
    with pytest.raises(ValueError, match=r"model\.safetensors: metadata 'unified_models\.formats'"):
        checkpoint.load(folder)


def test_what_is_not_committed_is_not_saved(toy: Any, loaded: Any, tmp_path: Path) -> None:
    model = loaded(toy.tensors())
    with torch.no_grad():
        model.blocks[1].proj.master.add_(1)
    with pytest.raises(
        RuntimeError, match=r"blocks\.1\.proj: the master changed since the last commit"
    ):
        checkpoint.save(model, tmp_path / "one")
    assert list(tmp_path.glob("*one*")) == []


def test_a_folder_that_holds_files_is_not_overwritten(
    toy: Any, loaded: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    model = loaded(toy.tensors())
    checkpoint.save(model, folder, max_shard_bytes=100_000)
    (folder / "tokenizer.json").write_text("mine")
    (folder / "extra").mkdir()
    (folder / "extra" / "file").write_text("mine, too")
    before = {path.name for path in folder.iterdir()}
    with pytest.raises(ValueError, match=r"one: holds files already .*overwrite=True"):
        checkpoint.save(model, folder)
    assert {path.name for path in folder.iterdir()} == before
    checkpoint.save(model, folder, overwrite=True)
    names = {path.name for path in folder.iterdir()}
    assert names == {"config.json", "model.safetensors", "tokenizer.json", "extra"}, "no old shard"
    assert (folder / "extra" / "file").read_text() == "mine, too"
    assert sorted(p.name for p in tmp_path.glob(".*")) == [], "nothing is left beside it"


def test_a_file_is_not_a_folder(toy: Any, loaded: Any, tmp_path: Path) -> None:
    (tmp_path / "one").write_text("")
    with pytest.raises(ValueError, match="is a file, not a folder"):
        checkpoint.save(loaded(toy.tensors()), tmp_path / "one", overwrite=True)
    with pytest.raises(ValueError, match="max_shard_bytes must be positive, got 0"):
        checkpoint.save(loaded(toy.tensors()), tmp_path / "two", max_shard_bytes=0)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_that_fails_leaves_no_half_checkpoint(
    toy: Any, loaded: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    model = loaded(toy.tensors())
    folder = tmp_path / "one"
    if overwrite:
        checkpoint.save(model, folder)
    before = files(folder) if overwrite else None

    def disk_full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("unified_models.checkpoint.shards.os.fsync", disk_full)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(model, folder, overwrite=overwrite)
    assert (files(folder) if folder.exists() else None) == before
    assert list(tmp_path.glob(".*")) == []


def test_saving_over_the_folder_it_was_loaded_from(toy: Any, tmp_path: Path) -> None:
    folder = toy.write(tmp_path / "one", toy.tensors("fp8_ue8m0", "mxfp4"))
    model = checkpoint.load(folder, weights="file")
    checkpoint.save(model, folder, overwrite=True)
    state = toy.tensors("fp8_ue8m0", "mxfp4")
    assert all(
        torch.equal(t.view(torch.uint8), state[n].view(torch.uint8))
        for n, t in tensors(folder).items()
    )
