"""The config.json files in configs/: as released, and the small ones that tests are built from."""

import hashlib
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import unified_models as um
from unified_models.config import load_json
from unified_models.registry import architectures, find

CONFIGS = Path(__file__).parent.parent / "configs"
RELEASED = {
    "deepseek_v4_flash.json": "b628e63398a645abc711d92207f8737dd8140f7a4ef1e0a5b3616019e0ddd818",
    "nemotron_3_nano_30b.json": "cf3cc01496f22ebc4f969e6ffbea75ff8796a94b406d16cc1e12520923f82474",
    "nemotron_3_super_120b.json": "4e5eef674539c087f87eb24534cee57ee00219f18e5311eba8640d4d6bdd968a",
    "nemotron_3_5_lightning_30b.json": "3440a8570e178cfc8a44e0877d48d6bc959cceed89a8e3a9afa7fa45790dea4e",
    "qwen3_0_6b.json": "660db3b73d788119c04535e48cf9be5f55bc3100841a718637ae695b442f27dd",
    "qwen3_8b.json": "f7c4eadfbbf522470667b797a3c89be2524832d2d599797248dc304fff447c30",
}
FILES = sorted(CONFIGS.rglob("*.json"))
NEMOTRON = sorted((CONFIGS / "tiny").glob("nemotron_h*.json"))
# Layers of Mamba-2, experts and attention, and parameters without MTP; router biases count.
NEMOTRON_SIZES = {
    "nemotron_3_nano_30b.json": ((23, 23, 6), 31_577_940_288),
    "nemotron_3_super_120b.json": ((40, 40, 8), 120_668_707_840),
    "nemotron_3_5_lightning_30b.json": ((23, 23, 6), 31_577_940_288),
}


def read(path: Path) -> Any:
    """The file's Config."""
    raw = load_json(path)
    return find(raw["model_type"]).Config.from_json(raw, str(path))


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_is_read_and_written_back(path: Path) -> None:
    raw = load_json(path)
    config_of = find(raw["model_type"]).Config
    config = config_of.from_json(raw, str(path))
    assert config_of.from_json(config.to_json()) == config


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_config_refuses_an_unknown_key(path: Path) -> None:
    raw = load_json(path)
    with pytest.raises(ValueError, match=r"hiden_size.*hidden_size"):
        find(raw["model_type"]).Config.from_json(raw | {"hiden_size": 1}, str(path))


@pytest.mark.parametrize("path", [p for p in FILES if p.parent == CONFIGS], ids=lambda p: p.stem)
def test_released_config_is_byte_for_byte(path: Path) -> None:
    assert hashlib.sha256(path.read_bytes()).hexdigest() == RELEASED[path.name]


@pytest.mark.parametrize("name", architectures())
def test_tiny_config_is_the_file_of_its_name(name: str) -> None:
    config_of = find(name).Config
    assert config_of.tiny() == config_of.from_json(load_json(CONFIGS / f"tiny/{name}.json"))


@pytest.mark.parametrize("name", NEMOTRON_SIZES)
def test_nemotron_release_has_its_layers_and_size(name: str) -> None:
    """The parameters are also added up from the numbers of the file."""
    raw, config = load_json(CONFIGS / name), read(CONFIGS / name)
    layers, size = NEMOTRON_SIZES[name]
    kinds = Counter(config.layers_block_type)
    assert tuple(kinds[kind] for kind in ("mamba", "moe", "attention")) == layers
    M, D, H = raw["hidden_size"], raw["head_dim"], raw["mamba_num_heads"]
    I, BC = H * raw["mamba_head_dim"], 2 * raw["n_groups"] * raw["ssm_state_size"]
    mamba = (2 * I + BC + H) * M + 5 * (I + BC) + 3 * H + I + I * M
    E, latent = raw["n_routed_experts"], raw.get("moe_latent_size")
    experts = 2 * E * (latent or M) * raw["moe_intermediate_size"] + 2 * M * (latent or 0)
    moe = experts + E * (M + 1) + 2 * M * raw["moe_shared_expert_intermediate_size"]
    attention = 2 * M * D * (raw["num_attention_heads"] + raw["num_key_value_heads"])
    blocks = sum(n * each for n, each in zip(layers, (mamba, moe, attention), strict=True))
    assert size == blocks + (sum(layers) + 1) * M + 2 * raw["vocab_size"] * M
    with torch.device("meta"):
        model = find("nemotron_h").Model(config)
    assert sum(p.numel() for p in model.parameters()) == size


def test_nemotron_releases_say_the_same_in_other_words_D22() -> None:
    """A pattern string and a list; no time limit and one of infinity, which is no JSON and read all the same."""
    nano, lightning, latent = (
        read(CONFIGS / f"nemotron_3_{name}.json")
        for name in ("nano_30b", "5_lightning_30b", "super_120b")
    )
    text = (CONFIGS / "nemotron_3_super_120b.json").read_text()
    assert "Infinity" in text and "hybrid_override_pattern" in text
    assert nano.layers_block_type == lightning.layers_block_type
    assert latent.time_step_limit == nano.time_step_limit == (0.0, math.inf)
    assert (latent.moe_latent_size, nano.moe_latent_size) == (1024, None)


def test_tiny_mixed_is_quantised_as_the_release() -> None:
    """FP8 in and out of each scan, NVFP4 in every expert and the head, FP8 keys and values, and nothing else."""
    config = read(CONFIGS / "tiny/nemotron_h_mixed.json")
    fp8, nvfp4 = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    wanted: dict[str, Any] = {"lm_head": nvfp4}
    for layer, kind in enumerate(config.layers_block_type):
        mixer = f"backbone.layers.{layer}.mixer"
        if kind == "mamba":
            wanted |= {f"{mixer}.{way}_proj": fp8 for way in ("in", "out")}
        elif kind == "moe":
            experts = [f"experts.{e}" for e in range(config.n_routed_experts)]
            for owner in [*experts, "shared_experts"]:
                wanted |= {f"{mixer}.{owner}.{way}_proj": nvfp4 for way in ("up", "down")}
    stated = config.quantization_config
    assert set(config.layers_block_type) == {"mamba", "moe", "attention"}, "the release's kinds"
    assert stated["quantized_layers"] == wanted
    assert stated["kv_cache_quant_algo"] == "FP8"
    assert not set(stated["ignore"]) & set(wanted)


def test_tiny_mixed_binds_its_formats() -> None:
    config = read(CONFIGS / "tiny/nemotron_h_mixed.json")
    model = find("nemotron_h").Model(config)
    formats: dict[str, set[str]] = {}
    for path, weight in model.weights():
        formats.setdefault(weight.format.name, set()).add(path.rpartition(".")[2])
    assert formats.pop("fp8_tensor") == {"in_proj", "out_proj"}
    assert formats.pop("nvfp4") == {"up", "down", "up_proj", "down_proj", "head"}
    assert {"embed", "gate", "q_proj", "k_proj", "v_proj", "o_proj"} <= formats.pop("bfloat16")
    assert {"A_log", "D", "dt_bias", "bias", "input_scale", "k_scale"} <= formats.pop("float32")
    assert not formats
    keys_values = [path for path, slot in model.slots().items() if "fp8" in slot.layout()]
    assert keys_values == ["blocks.3.mixer.keys_values"]


def test_tiny_variants_differ_where_they_say() -> None:
    """From nemotron_h.json, in what each is for; widths stay whole groups of 16."""
    base = load_json(CONFIGS / "tiny/nemotron_h.json")
    different = {}
    for path in NEMOTRON:
        raw = load_json(path)
        keys = {key for key in raw.keys() | base.keys() if raw.get(key) != base.get(key)}
        different[path.stem.removeprefix("nemotron_h").strip("_")] = keys
    spelling = {"layers_block_type", "hybrid_override_pattern", "time_step_limit"}
    aside = {"mtp_layers_block_type", "mtp_hybrid_override_pattern", "transformers_version"}
    aside.add("moe_shared_expert_overlap")
    assert different == {
        "": set(),
        "latent": {"moe_latent_size", "routed_scaling_factor"} | spelling | aside,
        "mixed": {"quantization_config", "layers_block_type", "num_hidden_layers"},
        "q128": {"chunk_size"},
    }
    assert read(CONFIGS / "tiny/nemotron_h_q128.json").chunk_size == 128
    widths = ("hidden_size", "moe_intermediate_size", "moe_shared_expert_intermediate_size")
    assert all(load_json(path)[key] % 16 == 0 for path in NEMOTRON for key in widths)


@pytest.mark.parametrize("path", NEMOTRON, ids=lambda p: p.stem)
def test_tiny_variant_rolls_out_and_trains_alike(path: Path, tmp_path: Path) -> None:
    um.make_tiny("nemotron_h", tmp_path / "m", seed=3, config=path)
    model = um.load(tmp_path / "m")
    assert model.config == read(path)
    prompts = [list(range(7, 7 + length)) for length in (1, 14, 30, 124)]
    outs = um.Engine(model, step_tokens=40).generate(prompts, um.Sampling(6, seed=1))
    sequences = [prompt + out.ids for prompt, out in zip(prompts, outs, strict=True)]
    trained = [lps.detach() for lps in um.logprobs(model, sequences)]
    again = [lps[len(p) - 1 :] for lps, p in zip(trained, prompts, strict=True)]
    assert um.verify.bits([out.logprobs for out in outs], again) == um.verify.Comparison(24, 0)
    again[2][0] = torch.nextafter(again[2][0], torch.zeros(()))
    assert um.verify.bits([out.logprobs for out in outs], again).unequal == 1
