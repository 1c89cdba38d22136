"""Files, index and headers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from unified_models import checkpoint
from unified_models.checkpoint.shards import DTYPES, Pending, open_shards, read_header, write_shard

SECOND = "model-00002-of-00003.safetensors"


@pytest.fixture
def folder(toy: Any, tmp_path: Path) -> Path:
    path: Path = toy.write(tmp_path / "checkpoint", toy.tensors(), shards=3)
    return path


def test_several_shards_load(folder: Path) -> None:
    report = checkpoint.load(folder).load_report
    assert (report.stray, report.skipped, report.changed) == ((), {}, ())


def test_e01_missing_shard(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(ValueError, match=rf"names 3 files, of which 1 do not exist: {SECOND}"):
        checkpoint.load(folder)


def test_e01_the_message_counts_and_cuts_a_long_list(toy: Any, tmp_path: Path) -> None:
    folder = toy.write(tmp_path / "many", toy.tensors(), shards=20)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"names 20 files, of which 20 .*, and 8 more"):
        checkpoint.load(folder)


def test_e02_stale_index(toy: Any, folder: Path) -> None:
    (folder / SECOND).rename(folder / "model-00007-of-00009.safetensors")
    with pytest.raises(
        ValueError, match=r"does not name \(model-00007.*the index is stale.*ignore_index"
    ):
        checkpoint.load(folder)
    report = checkpoint.load(folder, ignore_index=True).load_report
    assert report.stray == ()


def test_e02_stale_index_of_the_right_files(toy: Any, folder: Path) -> None:
    toy.edit(folder, lambda weight_map: weight_map.update({"embed.weight": SECOND}))
    with pytest.raises(
        ValueError, match=rf"index is stale: 1 tensors .*: embed.weight \({SECOND}\)"
    ):
        checkpoint.load(folder)


def test_e03_stray_file_is_reported_and_not_read(toy: Any, folder: Path) -> None:
    save_file({"head.weight": torch.zeros(3)}, folder / "model.safetensors")
    report = checkpoint.load(folder).load_report
    assert report.stray == ("model.safetensors",)
    assert "model.safetensors" in str(report)


def test_e03_beside_a_single_file(toy: Any, tmp_path: Path) -> None:
    folder = toy.write(tmp_path / "single", toy.tensors())
    (folder / "adapter.safetensors").write_bytes(b"not looked at")
    assert checkpoint.load(folder).load_report.stray == ("adapter.safetensors",)
    with pytest.raises(ValueError, match=r"adapter\.safetensors"):
        checkpoint.load(folder, ignore_index=True)


def test_a_tensor_that_the_index_does_not_name_is_reported(toy: Any, folder: Path) -> None:
    file = folder / SECOND
    save_file(load_file(file) | {"extra": torch.zeros(2)}, file)
    assert checkpoint.load(folder).load_report.unlisted == (f"extra ({SECOND})",)


def test_a_tensor_in_two_files_stops(folder: Path) -> None:
    save_file({"head.weight": torch.zeros(3)}, folder / "again.safetensors")
    with pytest.raises(ValueError, match=r"head\.weight is in again\.safetensors and in model-"):
        checkpoint.load(folder, ignore_index=True)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {}}'])
def test_a_broken_index_is_named(folder: Path, text: str) -> None:
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: "):
        checkpoint.load(folder)


@pytest.mark.parametrize("place", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", 3])
def test_an_index_cannot_leave_its_folder(toy: Any, folder: Path, place: Any) -> None:
    toy.edit(folder, lambda weight_map: weight_map.update({"embed.weight": place}))
    with pytest.raises(ValueError, match=r"embed\.weight is said to be in .*, not a file name"):
        checkpoint.load(folder)


def cut_in_header(raw: bytes) -> bytes:
    return raw[:50]


def lengthen_header(raw: bytes) -> bytes:
    return (10**9).to_bytes(8, "little") + raw[8:]


def shift(raw: bytes) -> bytes:
    """Offsets that leave a hole."""
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    last = max(
        (e for k, e in header.items() if k != "__metadata__"), key=lambda e: e["data_offsets"]
    )
    last["data_offsets"] = [n + 8 for n in last["data_offsets"]]
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + raw[8 + size :]


@pytest.mark.parametrize(
    ("break_", "complaint"),
    [
        (lambda raw: raw[:-1], "cut short: expected {full} bytes, the file has {size}; download"),
        (
            lambda raw: raw + b"\0" * 8,
            "longer .*: expected {full} bytes, the file has {size}; down",
        ),
        (lambda raw: b"", "expected at least 8 bytes, the file has 0; download it again"),
        (
            cut_in_header,
            r"cut in the header: expected at least \d+ bytes, the file has 50; download",
        ),
        (lengthen_header, "a header of 1000000000 bytes, the limit is 100000000"),
        (lambda raw: raw[:8] + b"\xff" + raw[9:], "the header is not one of safetensors"),
        (lambda raw: raw[:8] + b"[" + raw[9:], "the header is not one of safetensors"),
        (shift, "is at bytes .*, expected .*; download it again"),
    ],
    ids=[
        "cut",
        "padded",
        "zero-byte",
        "cut-in-header",
        "long-header",
        "bytes",
        "no-object",
        "hole",
    ],
)
def test_e05_broken_files(folder: Path, break_: Callable[[bytes], bytes], complaint: str) -> None:
    file = folder / SECOND
    raw = file.read_bytes()
    file.write_bytes(break_(raw))
    complaint = complaint.replace("{full}", str(len(raw)))
    complaint = complaint.replace("{size}", str(file.stat().st_size))
    with pytest.raises(ValueError, match=rf"{SECOND}: .*{complaint}"):
        checkpoint.load(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [1.5], "data_offsets": [0, 1]},
        {"dtype": "U8", "shape": [1], "data_offsets": [0]},
        {"dtype": "U8", "shape": [1]},
        {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]},
        7,
    ],
)
def test_e05_headers_that_make_no_sense(tmp_path: Path, entry: Any) -> None:
    text = json.dumps({"x": entry}).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"\0")
    with pytest.raises(ValueError, match=r"x\.safetensors: the header is not one of safetensors"):
        read_header(file)


@pytest.mark.parametrize("length", [99_995, 99_999, 100_001])
def test_e06_headers_of_awkward_sizes(tmp_path: Path, length: int) -> None:
    """The padding of a header is part of its length."""
    header = {"x": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    text = json.dumps(header).encode().ljust(length)
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"abc")
    shards = open_shards(tmp_path)
    assert shards.read("x").tolist() == list(b"abc")


def test_e06_many_tiny_tensors(tmp_path: Path) -> None:
    state = {f"layers.{i}.experts.{i}.w1.weight": torch.tensor([i]) for i in range(5000)}
    save_file(state, tmp_path / "model.safetensors")
    shards = open_shards(tmp_path)
    assert len(shards.tensors) == 5000
    assert shards.read("layers.4321.experts.4321.w1.weight").item() == 4321


def test_e07_zero_element_tensors(tmp_path: Path) -> None:
    state = {"a": torch.zeros(0, 16), "b": torch.ones(2), "c": torch.zeros(3, 0)}
    save_file(state, tmp_path / "model.safetensors")
    shards = open_shards(tmp_path)
    assert {name: shards.read(name).shape for name in state} == {
        n: t.shape for n, t in state.items()
    }


@pytest.mark.parametrize("files", [[], ["a.safetensors"], ["model-00001-of-00002.safetensors"]])
def test_a_folder_without_a_checkpoint(tmp_path: Path, files: list[str]) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ValueError, match=r"neither model\.safetensors\.index\.json nor .*is there"):
        open_shards(tmp_path)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder"):
        open_shards(tmp_path / "nowhere")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_written_files_are_read_by_the_library(
    tmp_path: Path, dtype: torch.dtype, same: Any
) -> None:
    raw = torch.randint(0, 2, (24,), dtype=torch.uint8)
    tensor = raw.view(dtype)
    scalar = tensor[0].clone()
    empty = tensor[:0]
    file = tmp_path / "model.safetensors"
    given = {"b": tensor, "a": scalar, "c": empty}
    write_shard(
        file, [Pending(n, t.dtype, t.shape, lambda t=t: t) for n, t in given.items()], {"k": "v"}
    )
    back = load_file(file)
    assert all(same(back[name], tensor) for name, tensor in given.items())
    assert read_header(file)[1] == {"format": "pt", "k": "v"}
