"""What ModelOpt's configs say of each linear, in every form they are written in."""

import copy
from typing import Any

import pytest

from unified_models.quantization import (
    Quantization,
    hf_quant_config,
    is_modelopt,
    quantization_config,
)

FP8, FOUR = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
CACHE = {"dynamic": False, "num_bits": 8, "type": "float"}
MIXED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_scheme": CACHE,
    "quantized_layers": {
        "backbone.layers.0.mixer.in_proj": FP8,
        "backbone.layers.1.mixer.experts.0.up_proj": FOUR,
        "lm_head": FOUR | {"four_over_six": True},
    },
    "ignore": ["backbone.embeddings", "backbone.layers.0.mixer.conv1d", "mtp*"],
    "config_groups": {"group_0": {"targets": ["lm_head"]}},
    "producer": {"name": "modelopt", "version": "0.44.0rc5"},
}


def read(raw: Any) -> Quantization:
    return Quantization.from_json(raw, "c.json")


@pytest.mark.parametrize("prefix", ["backbone.", "model.", ""])
def test_each_module_of_a_mixed_config(prefix: str) -> None:
    said = read(MIXED)
    for module, format in (
        ("layers.0.mixer.in_proj", "fp8_tensor"),
        ("layers.1.mixer.experts.0.up_proj", "nvfp4"),
        ("layers.1.mixer.experts.1.up_proj", "bfloat16"),
        ("layers.0.mixer.conv1d", "bfloat16"),
        ("layers.0.mixer.in_proj_", "bfloat16"),
    ):
        assert said.stated(prefix + module) == said.expected(prefix + module) == format
    assert said.stated("lm_head") == "nvfp4_four_over_six"
    assert said.kv_cache == "FP8" and said.algorithm is None


@pytest.mark.parametrize(
    ("excluded", "module"),
    [
        ("backbone.layers.4.mixer.in_proj", "backbone.layers.4.mixer.in_proj"),
        ("backbone.layers.4.mixer", "layers.4.mixer.in_proj"),
        ("layers.4.mixer.in_proj", "backbone.layers.4.mixer.in_proj"),
        ("backbone.layers.4.*", "backbone.layers.4.mixer.in_proj"),
        ("*in_proj", "backbone.layers.4.mixer.in_proj"),
        ("*.mixer.in_[pq]roj", "backbone.layers.4.mixer.in_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_patterns_of_one_algorithm_D21(excluded: str, module: str) -> None:
    """A pattern is a guess: nothing is stated, and the file may hold something else."""
    for key in ("ignore", "exclude_modules"):
        said = read({"quant_algo": "NVFP4", "group_size": 16, key: [excluded]})
        assert said.stated(module) is None and said.expected(module) == "bfloat16"
        assert said.stated("layers.44.mixer.out_proj") is None
        assert said.expected("layers.44.mixer.out_proj") == "nvfp4"
    assert said.kv_cache is None


def test_nothing_said() -> None:
    for raw in (None, {"quant_algo": None, "kv_cache_quant_algo": None}):
        said = read(raw)
        assert said == Quantization() and said.stated("lm_head") == "bfloat16"


@pytest.mark.parametrize("scheme", [CACHE, "FP8", None], ids=str)
def test_caches(scheme: Any) -> None:
    said = read({"quant_algo": "FP8", "kv_cache_scheme": scheme})
    assert said.kv_cache == (None if scheme is None else "FP8")
    assert read({"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}).kv_cache == "FP8"


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (
            {"quant_algo": "NVFP4_AWQ"},
            r"c\.json: quant_algo = 'NVFP4_AWQ'; known: FP8, NVFP4, W4A16",
        ),
        ({"quant_algo": "NVFP4", "group_size": 32}, "group_size = 32, NVFP4 has groups of 16"),
        ({"quant_algo": "MIXED_PRECISION"}, "needs quantized_layers"),
        ({"quant_algo": "FP8", "quantized_layers": {"a": FP8}}, "quantized_layers and quant_algo"),
        ({"quant_method": "fp8"}, "quant_method = 'fp8'; only 'modelopt' is known here"),
        ({"quant_algo": "FP8", "pre_quant_scale": 1}, "unknown key 'pre_quant_scale' = 1; known: "),
        ({"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo = 'NVFP4'; known: FP8, null"),
        ({"kv_cache_scheme": "NVFP4"}, "kv_cache_scheme = 'NVFP4'; only static FP8 is known"),
        ({"kv_cache_scheme": CACHE | {"dynamic": True}}, "only static FP8 is known"),
        ({"kv_cache_scheme": CACHE | {"num_bits": 4}}, "only static FP8 is known"),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": {"quant_algo": "INT4"}}},
            r"c\.json: a\.b: quant_algo = 'INT4'",
        ),
        (
            {"quant_algo": "MIXED_PRECISION", "quantized_layers": {"a.b": "FP8"}},
            r"c\.json: a\.b: 'FP8', expected an object",
        ),
        ({"quant_algo": "MIXED_PRECISION", "quantized_layers": ["a"]}, r"= \['a'\], expected an"),
        ({"quant_algo": "FP8", "ignore": "lm_head"}, "= 'lm_head', expected a list of names"),
        ({"quant_algo": "FP8", "exclude_modules": [1]}, r"= \[1\], expected a list of names"),
    ],
)
def test_what_is_not_known_is_refused(raw: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read(raw)


def test_there_and_back() -> None:
    """Both files say the same; nothing is lost but the groups, which say what the layers say."""
    content = hf_quant_config(MIXED)
    assert content["producer"] == MIXED["producer"] and set(content) == {"producer", "quantization"}
    said = content["quantization"]
    assert set(said) == {"quant_algo", "kv_cache_quant_algo", "quantized_layers", "exclude_modules"}
    assert said["exclude_modules"] == MIXED["ignore"] and said["kv_cache_quant_algo"] == "FP8"
    config = quantization_config(content, "h.json")
    assert config == {k: v for k, v in MIXED.items() if k != "config_groups"} | {
        "kv_cache_quant_algo": "FP8"
    }
    assert hf_quant_config(config) == content
    for raw in (said, config):
        assert read(raw) == read(MIXED) and read(raw).difference(read(MIXED)) is None
    with pytest.raises(ValueError, match=r"h\.json: quantization = None, expected an object"):
        quantization_config({"producer": {}}, "h.json")


def test_whose_it_is() -> None:
    assert is_modelopt(MIXED) and is_modelopt({"quant_algo": "FP8"})
    assert not is_modelopt({"quant_method": "fp8"}) and not is_modelopt(None)


def test_the_first_difference() -> None:
    one = read(MIXED)

    def other(**changes: Any) -> tuple[str, Any, Any] | None:
        return one.difference(read(copy.deepcopy(MIXED) | changes))

    layers = dict(MIXED["quantized_layers"])
    assert other() is None
    assert other(ignore=MIXED["ignore"][::-1]) is None, "the order of a list says nothing"
    assert other(kv_cache_scheme=None) == ("kv_cache", "FP8", None)
    told = ("layers.0.mixer.in_proj", "fp8_tensor", "nvfp4")
    assert other(quantized_layers=layers | {"backbone.layers.0.mixer.in_proj": FOUR}) == told
    extra = {"backbone.layers.9.mixer.in_proj": FP8}
    assert other(quantized_layers=layers | extra) == ("layers.9.mixer.in_proj", None, "fp8_tensor")
    assert other(ignore=["mtp*", "embeddings"]) == ("layers.0.mixer.conv1d", "excluded", None)
    uniform = read({"quant_algo": "FP8"})
    assert one.difference(uniform) == ("algorithm", None, "fp8_tensor")
