"""DeepSeek-V4's checkpoints: official names both ways, and the same weights in transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import unified_models as um
from unified_models import checkpoint

PLAIN: dict[str, Any] = {"quantization_config": None, "expert_dtype": None}
FP4 = {"expert_dtype": "fp4"}
IDS = [[5, 511, 0, 77, 3, 3, 260, 19, 44, 501, 7, 7, 130, 12, 99, 4, 311, 257]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(**overrides: Any) -> Path:
        key = json.dumps(overrides, sort_keys=True)
        if key not in made:
            made[key] = tmp_path_factory.mktemp("v4") / "checkpoint"
            um.make_tiny("deepseek_v4", made[key], **overrides)
        return made[key]

    return make


def test_official_names_shapes_and_dtypes(folders: Any) -> None:
    """The names of the released files (304 tensors without scales), in their dtypes."""
    found = load_file(folders(**FP4) / "model.safetensors")
    scales = {name for name in found if name.endswith(".scale")}
    assert len(found) - len(scales) == 304
    e4m3, e8m0, i8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8
    for name, dtype, shape in (
        ("embed.weight", torch.bfloat16, (512, 256)),
        ("head.weight", torch.bfloat16, (512, 256)),
        ("norm.weight", torch.bfloat16, (256,)),
        ("hc_head_fn", torch.float32, (4, 1024)),
        ("hc_head_scale", torch.float32, (1,)),
        ("layers.0.hc_attn_fn", torch.float32, (24, 1024)),
        ("layers.0.attn.attn_sink", torch.float32, (4,)),
        ("layers.0.attn.wq_b.weight", e4m3, (512, 128)),
        ("layers.0.attn.wq_b.scale", e8m0, (4, 1)),
        ("layers.0.attn.kv_norm.weight", torch.bfloat16, (128,)),
        ("layers.0.ffn.gate.tid2eid", torch.int64, (512, 2)),
        ("layers.3.ffn.gate.bias", torch.float32, (8,)),
        ("layers.2.attn.compressor.ape", torch.float32, (4, 256)),
        ("layers.3.attn.compressor.ape", torch.float32, (128, 128)),
        ("layers.2.attn.indexer.wq_b.weight", e4m3, (2048, 128)),
        ("layers.2.attn.indexer.weights_proj.weight", torch.bfloat16, (16, 256)),
        ("layers.2.attn.indexer.compressor.norm.weight", torch.bfloat16, (128,)),
        ("layers.5.ffn.shared_experts.w2.weight", e4m3, (256, 128)),
        ("layers.5.ffn.experts.7.w2.weight", i8, (256, 64)),
        ("layers.5.ffn.experts.7.w2.scale", e8m0, (256, 4)),
        ("layers.5.ffn.experts.7.w1.weight", i8, (128, 128)),
    ):
        assert (found[name].dtype, tuple(found[name].shape)) == (dtype, shape), name
    assert "layers.3.ffn.gate.tid2eid" not in found and "layers.2.ffn.gate.bias" not in found


@pytest.mark.parametrize("overrides", [PLAIN, {}, FP4], ids=["bf16", "fp8", "fp4"])
def test_save_load_save(folders: Any, tmp_path: Path, overrides: dict[str, Any]) -> None:
    folder = folders(**overrides)
    model = um.load(folder)
    um.save(model, tmp_path / "again", max_shard_bytes=1_000_000)
    um.save(um.load(tmp_path / "again"), tmp_path / "once_more")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "once_more" / name).read_bytes() == (folder / name).read_bytes()


@pytest.mark.parametrize("overrides", [PLAIN, {}, FP4], ids=["bf16", "fp8", "fp4"])
def test_c27_both_sides_and_the_file_agree(folders: Any, overrides: dict[str, Any]) -> None:
    """What a server holds of the file, what a trainer packs from masters, and the logprobs of both."""
    served = um.load(folders(**overrides), weights="file")
    trained = um.load(folders(**overrides))
    assert trained.load_report.changed == ()
    for (path, a), (_, b) in zip(served.weights(), trained.weights(), strict=True):
        assert torch.equal(a().value, b().value), path


def test_a26_a27_an_update_equals_a_fresh_load(folders: Any, tmp_path: Path) -> None:
    um.make_tiny("deepseek_v4", tmp_path / "other", seed=1)
    model, fresh = um.load(folders()), um.load(tmp_path / "other")
    before = um.logprobs(model, IDS)[0]
    for _ in range(2):
        checkpoint.update(model, um.named_tensors(fresh))
        assert torch.equal(um.logprobs(model, IDS)[0], um.logprobs(fresh, IDS)[0])
    assert not torch.equal(before, um.logprobs(fresh, IDS)[0])


def test_a16_every_tensor_of_the_list_is_read(folders: Any) -> None:
    """Change one tensor of each kind: the logprobs move (the indexer's need a longer sequence)."""
    model = um.load(folders())
    ids = [torch.randint(0, 512, (40,)).tolist()]
    before = um.logprobs(model, ids)[0]
    kept = {name: values.clone() for name, values in um.named_tensors(model)}
    quiet = []
    for name in (
        "layers.0.ffn.gate.tid2eid",
        "layers.3.ffn.gate.bias",
        "layers.1.attn.attn_sink",
        "layers.2.attn.compressor.ape",
        "layers.2.attn.indexer.weights_proj.weight",
        "layers.4.hc_ffn_base",
        "hc_head_scale",
        "norm.weight",
    ):
        changed = kept[name].roll(1, -1) if kept[name].dtype == torch.int64 else -kept[name]
        if kept[name].dtype == torch.int64:
            changed = (changed + 1) % 8
        checkpoint.update(model, [(name, changed)], strict=False)
        if torch.equal(um.logprobs(model, ids)[0], before):
            quiet.append(name)
        checkpoint.update(model, [(name, kept[name])], strict=False)
    assert quiet == []
    assert torch.equal(um.logprobs(model, ids)[0], before)


def reshape(folder: Path, to: Path, change: Any, config: Any = None) -> Path:
    """A copy of a checkpoint with its tensors and its config changed."""
    to.mkdir()
    with safe_open(folder / "model.safetensors", "pt") as f:
        state = {name: f.get_tensor(name).clone() for name in f.keys()}  # noqa: SIM118
    save_file(change(state), to / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (to / "config.json").write_text(json.dumps(config(raw) if config else raw))
    return to


def test_c05_draft_tensors_and_extra_ratios(folders: Any, tmp_path: Path) -> None:
    folder = folders()
    config = json.loads((folder / "config.json").read_text())
    assert len(config["compress_ratios"]) > config["num_hidden_layers"]

    def draft(state: dict[str, Tensor]) -> dict[str, Tensor]:
        mtp = {
            name.replace("layers.1.", "mtp.0."): t.clone()
            for name, t in state.items()
            if "layers.1." in name
        }
        return (
            state
            | mtp
            | {"mtp.0.e_proj.weight": torch.zeros(2), "mtp.0.hc_head_fn": torch.zeros(2)}
        )

    def longer(raw: dict[str, Any]) -> dict[str, Any]:
        return raw | {"compress_ratios": [*raw["compress_ratios"], 0, 0], "dspark_block_size": 5}

    model = um.load(reshape(folder, tmp_path / "a", draft, longer))
    report = model.load_report
    assert set(report.skipped) and all(name.startswith("mtp.") for name in report.skipped)
    assert "multi-token prediction" in str(report)
    assert torch.equal(um.logprobs(model, IDS)[0], um.logprobs(um.load(folder), IDS)[0])


@pytest.mark.parametrize(
    ("said", "held"), [("fp8", FP4), ("fp4", {})], ids=["says-fp8-holds-fp4", "says-fp4-holds-fp8"]
)
def test_c12_expert_dtype_that_contradicts_the_tensors(
    folders: Any, tmp_path: Path, said: str, held: dict[str, Any]
) -> None:
    wrong = reshape(folders(**held), tmp_path / "a", dict, lambda raw: raw | {"expert_dtype": said})
    with pytest.raises(
        ValueError, match=r"config says .* for blocks\.0\.ffn\.experts\.gate, tensor .* holds"
    ):
        um.load(wrong)


@pytest.mark.parametrize("overrides", [{}, FP4], ids=["fp8", "fp4"])
def test_c12_expert_dtype_that_is_absent(
    folders: Any, tmp_path: Path, overrides: dict[str, Any]
) -> None:
    def silent(raw: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in raw.items() if key != "expert_dtype"}

    model = um.load(reshape(folders(**overrides), tmp_path / "a", dict, silent))
    expected = um.load(folders(**overrides))
    assert torch.equal(um.logprobs(model, IDS)[0], um.logprobs(expected, IDS)[0])


def test_c10_base_stores_float32_scales(folders: Any, tmp_path: Path) -> None:
    """The Base release: its config says ue8m0, its scales are float32. Powers of two lose nothing."""

    def widen(state: dict[str, Tensor]) -> dict[str, Tensor]:
        return {
            name: t.float() if t.dtype == torch.float8_e8m0fnu else t for name, t in state.items()
        }

    model = um.load(reshape(folders(), tmp_path / "a", widen))
    assert {w.format.name for p, w in model.weights() if "experts" in p} == {"fp8_float32"}
    names = {change.name for change in model.load_report.changed}
    assert names and all(change.largest < 0.04 for change in model.load_report.changed)
    served = um.load(tmp_path / "a", weights="file")
    original = um.load(folders())
    for (path, a), (_, b) in zip(served.weights(), original.weights(), strict=True):
        assert torch.equal(a().value, b().value), path


def test_e09_names_with_prefix_and_as_transformers_writes_them(
    folders: Any, tmp_path: Path
) -> None:
    def rename(name: str) -> str:
        name = name.replace(".attn.kv_norm.", ".attn.norm.").replace("hc_head_", "hc_head.hc_")
        return "lm_head.weight" if name == "head.weight" else f"model.{name}"

    folder = folders()
    renamed = reshape(
        folder, tmp_path / "a", lambda state: {rename(name): t for name, t in state.items()}
    )
    assert torch.equal(um.logprobs(um.load(renamed), IDS)[0], um.logprobs(um.load(folder), IDS)[0])


def test_transformers_loads_what_is_saved_and_back(folders: Any, tmp_path: Path) -> None:
    """No key missing, none unexpected, the same logprobs to float32 accuracy; and what it saves loads here."""
    transformers = pytest.importorskip("transformers")
    um.save(um.load(folders(**PLAIN)), tmp_path / "ours", max_shard_bytes=4_000_000)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ours = um.load(tmp_path / "ours", numerics="float32")
    with torch.no_grad():
        logits = theirs(torch.tensor(IDS)).logits[0]
        expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(IDS)[0, 1:, None])[:, 0]
        assert torch.allclose(um.logprobs(ours, IDS)[0], expected, atol=1e-4, rtol=0)
    theirs.save_pretrained(tmp_path / "theirs")
    back = um.load(tmp_path / "theirs", numerics="float32")
    for (name, a), (_, b) in zip(um.named_tensors(ours), um.named_tensors(back), strict=True):
        assert torch.equal(a, b), name
