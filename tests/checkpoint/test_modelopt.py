"""ModelOpt's checkpoints: what its configs say, which rule packed four bits, and what packing them again changes."""

import io
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

import unified_models as um
from unified_models import checkpoint
from unified_models.checkpoint import divisor
from unified_models.formats import find

FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
NVFP4 = {"quant_algo": "NVFP4", "ignore": ["lm_head"]}
FOUR_OVER_SIX = {"quant_algo": "W4A16_NVFP4", "four_over_six": True}


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all tensors that are read from now on."""
    seen: list[str] = []
    read = checkpoint.shards.Shards.read

    def listed(self: Any, name: str) -> Tensor:
        seen.append(name)
        return read(self, name)

    monkeypatch.setattr(checkpoint.shards.Shards, "read", listed)
    return seen


def undeclared(config: Path) -> None:
    """Take the rule of four bits out of a config.json, as released ones have none."""
    raw = json.loads(config.read_text())
    del raw["quantization_config"]["four_over_six"]
    config.write_text(json.dumps(raw))
    (config.parent / "hf_quant_config.json").unlink()


def test_block_scales_tell_four_over_six(
    changed: Any, same: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No config says it. Only block scales are read for it, and of as many matrices as it takes."""
    folder = changed(lambda state: None, FOUR_OVER_SIX)
    named = um.load(folder)
    undeclared(folder / "config.json")
    seen = reads(monkeypatch)
    model = um.load(folder)
    looked = seen[: seen.index(next(name for name in seen if not name.endswith("weight_scale")))]
    assert 0 < len(looked) <= divisor.ENOUGH
    assert model.load_report.changed == () and model.load_report.notes == ()
    for (path, a), (_, b) in zip(named.weights(), model.weights(), strict=True):
        assert a.format is b.format, path
        assert all(same(a().packed[key], b().packed[key]) for key in a.packed_names), path
    assert model.head.format.name == "nvfp4_four_over_six"
    assert checkpoint.describe(folder).formats["nvfp4_four_over_six"] > 100_000


def test_one_scale_of_448_tells_the_usual_rule(
    nemotrons: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = reads(monkeypatch)
    model = um.load(nemotrons(NVFP4))
    assert seen[0].endswith("in_proj.weight_scale") and not seen[1].endswith("weight_scale")
    assert model.blocks[1].mixer.experts.up.format.name == "nvfp4"


@pytest.mark.parametrize("largest", [448, 384, 250, 1])
def test_matrices_that_share_a_global_scale(
    changed: Any, toy_file: Any, largest: int, tmp_path: Path
) -> None:
    """The first has no large scale, since its global one is another's: the next decides. All zeros tell nothing."""
    scale = torch.tensor(float(largest)).to(torch.float8_e4m3fn)

    def shrink(state: dict[str, Tensor]) -> None:
        for name in state:
            if name.endswith("weight_scale") and largest < 448:
                state[name].copy_(torch.minimum(state[name].float(), torch.tensor(300.0)))
                state[name][0, 0] = torch.tensor(256.0)
        first = state["backbone.layers.0.mixer.in_proj.weight_scale"]
        first.copy_(torch.minimum(first.float(), scale.float()))
        if largest == 1:
            for name in state:
                if name.endswith("weight_scale"):
                    state[name].fill_(1.0)

    model = um.load(changed(shrink, NVFP4))
    usual = largest in (448, 1)
    expected = "nvfp4" if usual else "nvfp4_four_over_six"
    assert model.blocks[1].mixer.experts.down.format.name == expected
    assert (model.load_report.changed != ()) == (largest != 448)


def test_repacking_is_reported_in_blocks_of_sixteen(changed: Any, toy_file: Any) -> None:
    """Codes of a kind that no rule leaves: each group of 16 is compared with the float64 values of the file."""
    generator = torch.Generator().manual_seed(3)
    name = "backbone.layers.1.mixer.experts.2.up_proj"

    def random(state: dict[str, Tensor]) -> None:
        codes = state[f"{name}.weight"]
        codes.copy_(torch.randint(0, 256, codes.shape, generator=generator))
        codes[:, 0] = 0x77  # the largest code, so most groups come back as they are
        codes[0, :8] = 0x11  # a group of the smallest code: another scale fits it better

    folder = changed(random, NVFP4)
    state, model = load_file(folder / "model.safetensors"), um.load(folder)
    (change,) = model.load_report.changed
    old = toy_file.oracle(state, name).float()
    new = model.blocks[1].mixer.experts.up().value[2].detach()
    assert (change.name, change.format) == (f"{name}.weight", "nvfp4")
    groups_old, groups_new = old.view(80, 8, 16).double(), new.view(80, 8, 16).double()
    moved = (groups_old - groups_new).abs().amax(-1)
    large = torch.maximum(groups_old.abs().amax(-1), groups_new.abs().amax(-1))
    assert (change.blocks, change.changed) == (80 * 8, int((moved > 0).sum())) and change.changed
    assert change.largest == pytest.approx((moved / large).max().item(), rel=1e-6)
    assert checkpoint.describe(folder).changed == (change,)


def test_repacking_of_a_whole_tensor_is_reported(changed: Any) -> None:
    name = "backbone.layers.2.mixer.out_proj"
    folder = changed(lambda state: state[f"{name}.weight_scale"].mul_(2), FP8)
    assert um.load(folder).load_report.changed == ()
    folder = changed(lambda state: state[f"{name}.weight_scale"].mul_(1.7), FP8)
    (change,) = um.load(folder).load_report.changed
    assert (change.name, change.blocks, change.changed) == (f"{name}.weight", 1, 1)
    assert 0 < change.largest < 2**-8, "448 times the scale is no bfloat16, so the scale is another"
    assert "1 fp8_tensor tensors, 1 of 1 blocks" in str(um.load(folder).load_report)


def test_what_a_pattern_implies_and_the_file_holds_D21(
    changed: Any, nemotrons: Any, tmp_path: Path
) -> None:
    """An exclude list with a misspelt entry, and a tensor that the file holds plain: tensors decide, and it is told."""
    config = {"quant_algo": "NVFP4", "ignore": ["lm_head.weight_", "mtp*"]}
    folder = nemotrons(config)
    plain = "backbone.layers.3.mixer.q_proj"

    def edit(state: dict[str, Tensor]) -> None:
        for name in [n for n in state if n.startswith(plain)]:
            del state[name]
        state[f"{plain}.weight"] = torch.randn(128, 128).bfloat16()
        state["mtp.layers.0.eh_proj.weight"] = torch.zeros(2).bfloat16()

    other = changed(edit, config)
    assert um.load(folder).load_report.notes == ()
    told = f"{plain}.weight: a pattern of config.json implies nvfp4, the file holds bfloat16"
    model = um.load(other)
    assert model.load_report.notes == (told,) and told in str(model.load_report)
    report, out = checkpoint.describe(other), io.StringIO()
    checkpoint.print_report(report, Console(file=out, width=200))
    assert report.notes == (told,) and f"note: {told}" in out.getvalue()
    assert model.blocks[3].mixer.q_proj.format.name == "bfloat16"
    assert model.blocks[3].mixer.k_proj.format.name == "nvfp4"
    assert list(model.load_report.skipped) == ["mtp.layers.0.eh_proj.weight"]


def test_a_stated_format_that_tensors_contradict_stops_D21(changed: Any) -> None:
    name = "backbone.layers.0.mixer.out_proj"

    def edit(state: dict[str, Tensor]) -> None:
        del state[f"{name}.weight_scale"], state[f"{name}.input_scale"]
        state[f"{name}.weight"] = torch.randn(128, 128).bfloat16()

    told = rf"config says fp8_tensor for blocks\.0\.mixer\.out_proj, tensor {name}\.weight holds bfloat16"
    with pytest.raises(ValueError, match=told):
        um.load(changed(edit))


def test_a_stated_module_that_is_never_quantised_stops_D21(changed: Any) -> None:
    """Of the embedding, which this architecture keeps plain: not silently another format."""
    folder = changed(lambda state: None)
    raw = json.loads((folder / "config.json").read_text())
    raw["quantization_config"]["quantized_layers"]["backbone.embeddings"] = {"quant_algo": "FP8"}
    (folder / "config.json").write_text(json.dumps(raw))
    (folder / "hf_quant_config.json").unlink()
    with pytest.raises(ValueError, match=r"config says fp8_tensor for embed, tensor .* bfloat16"):
        um.load(folder)


@pytest.mark.parametrize("scaled", [False, True])
def test_a_quantised_convolution_is_refused_D21(changed: Any, scaled: bool) -> None:
    name = "backbone.layers.2.mixer.conv1d"

    def edit(state: dict[str, Tensor]) -> None:
        state[f"{name}.weight"] = state[f"{name}.weight"].to(torch.float8_e4m3fn)
        if scaled:
            state[f"{name}.weight_scale"] = torch.tensor(0.1)
            state[f"{name}.input_scale"] = torch.tensor(0.1)

    with pytest.raises(ValueError, match=rf"{name}\.weight is F8_E4M3, expected plain values"):
        um.load(changed(edit))


def test_a_config_beside_config_json_is_read(changed: Any, nemotrons: Any, tmp_path: Path) -> None:
    """hf_quant_config.json alone says the same, and a save writes both."""
    folder = changed(lambda state: None)
    raw = json.loads((folder / "config.json").read_text())
    own = raw.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(raw))
    um.save(um.load(folder), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert saved == own | {"kv_cache_quant_algo": "FP8"}
    beside = json.loads((tmp_path / "saved/hf_quant_config.json").read_text())
    assert beside == json.loads((folder / "hf_quant_config.json").read_text())
    assert set(beside) == {"producer", "quantization"}
    assert beside["quantization"]["exclude_modules"] == own["ignore"]
    for name in ("model.safetensors", "hf_quant_config.json"):
        path = nemotrons() / name
        assert (tmp_path / "saved" / name).read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("kv_cache_quant_algo", None, r"kv_cache is 'FP8' in the one, None in the other"),
        (
            "quantized_layers",
            {"lm_head": {"quant_algo": "FP8"}},
            r"layers\.0\.mixer\.in_proj is 'fp8_tensor' in the one, None in the other",
        ),
        ("exclude_modules", ["mtp*"], r"embeddings is 'excluded' in the one, None in the other"),
    ],
)
def test_two_configs_that_differ_are_refused(changed: Any, key: str, value: Any, told: str) -> None:
    folder = changed(lambda state: None)
    path = folder / "hf_quant_config.json"
    content = json.loads(path.read_text())
    content["quantization"][key] = value
    path.write_text(json.dumps(content))
    both = rf"{folder}/config\.json and {path} differ: "
    with pytest.raises(ValueError, match=both + told):
        um.load(folder)


def test_the_other_methods_config_is_not_mixed_up(tmp_path: Path, nemotrons: Any) -> None:
    """DeepSeek's block FP8 is not ModelOpt's: no file beside config.json is written, and one that is there stops."""
    um.make_tiny("deepseek_v4", tmp_path / "v4")
    assert not (tmp_path / "v4/hf_quant_config.json").exists()
    text = (nemotrons() / "hf_quant_config.json").read_text()
    (tmp_path / "v4/hf_quant_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: quantization_config is of another method"):
        um.load(tmp_path / "v4")


def test_saving_over_leaves_no_old_config(nemotrons: Any, tmp_path: Path) -> None:
    um.save(um.load(nemotrons()), tmp_path / "one")
    um.save(um.load(nemotrons(None)), tmp_path / "one", overwrite=True)
    assert {path.name for path in (tmp_path / "one").iterdir()} == {
        "config.json",
        "model.safetensors",
    }
    assert um.load(tmp_path / "one").head.format.name == "bfloat16"


def test_a_config_of_thousands_of_modules_is_quick(mixed: Any) -> None:
    """As released: 23 layers of 128 experts. Each module is looked up, not searched."""
    from unified_models.quantization import Quantization

    layers = ["mamba", "moe"] * 23 + ["attention"] * 6
    raw = mixed(layers, 128)
    assert len(raw["quantized_layers"]) == 46 + 23 * 258 + 1
    start = time.perf_counter()
    said = Quantization.from_json(raw, "config.json")
    formats = [said.stated(module) for module in raw["quantized_layers"]]
    implied = [said.expected(module) for module in raw["quantized_layers"]]
    assert time.perf_counter() - start < 1
    assert formats == implied and formats.count("fp8_tensor") == 46
    assert find("nvfp4").name in formats
