"""The configuration of Nemotron-H: every written form, the released files, and every refusal with its values."""

import json
import math
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from unified_models.config import load_json
from unified_models.models.nemotron_h import FIXED, LETTERS, SIZES, TINY, Config, Model

ROOT = Path(__file__).parent.parent.parent
NANO = load_json(ROOT / "configs/nemotron_3_nano_30b.json")
LIGHTNING = load_json(ROOT / "configs/nemotron_3_5_lightning_30b.json")
SUPER = load_json(ROOT / "configs/nemotron_3_super_120b.json")

WITHOUT_LAYERS = {key: value for key, value in TINY.items() if key != "layers_block_type"}


def refuses(told: str, raw: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=told):
        Config.from_json(raw)


def parameters(cfg: Config) -> int:
    """Trained values: all but the router's correction bias, which no gradient moves."""
    with torch.device("meta"):
        model = Model(cfg)
    weights = [w for _, w in model.weights()]
    assert all(w.master is not None and w.master.is_meta for w in weights)
    return sum(prod(w.shape) for w in weights if not w.frozen)


def test_released_layers() -> None:
    """30B: 23 scans, 23 of experts and 6 of attention, one mixer a layer; Super: 40, 40 and 8, in a latent space."""
    for raw in (NANO, LIGHTNING):
        cfg = Config.from_json(raw)
        assert Counter(cfg.layers_block_type) == {"mamba": 23, "moe": 23, "attention": 6}
        attention = [i for i, kind in enumerate(cfg.layers_block_type) if kind == "attention"]
        assert attention == [5, 12, 19, 26, 33, 42]
        assert (cfg.mamba_num_heads, cfg.mamba_head_dim, cfg.ssm_state_size) == (64, 64, 128)
        assert (cfg.chunk_size, cfg.time_step_limit) == (128, (0.0, math.inf))
    cfg = Config.from_json(SUPER)
    assert Counter(cfg.layers_block_type) == {"mamba": 40, "moe": 40, "attention": 8}
    assert (cfg.moe_latent_size, cfg.routed_scaling_factor) == (1024, 5.0)


def test_both_releases_of_30b_are_one_shape() -> None:
    """A pattern string and a list of layers; only the longest sequence differs."""
    assert "hybrid_override_pattern" in NANO and "layers_block_type" in LIGHTNING
    nano, lightning = (dict(vars(Config.from_json(raw))) for raw in (NANO, LIGHTNING))
    lengths = [cfg.pop("max_position_embeddings") for cfg in (nano, lightning)]
    assert lengths == [262144, 1048576]
    assert nano == lightning


def test_released_number_of_parameters() -> None:
    """As counted over the reference implementation, and once more by hand from the released numbers."""
    cfg = Config.from_json(NANO)
    M, V, I, G, N, H = 2688, 131072, 64 * 64, 8, 128, 64
    mamba = M * (2 * I + 2 * G * N + H) + (I + 2 * G * N) * 5 + 3 * H + I + I * M
    attention = 2 * M * 32 * 128 + 2 * M * 2 * 128
    moe = 128 * M + 128 * 2 * M * 1856 + 2 * M * 3712
    by_hand = 23 * mamba + 6 * attention + 23 * moe + 2 * V * M + 53 * M
    assert parameters(cfg) == by_hand == 31_577_937_344


def test_a_dense_release_has_older_keys() -> None:
    """Nemotron-H (2025) has no experts, calls the head dim and the norm's epsilon otherwise, and gives a rank."""
    older = {k: v for k, v in WITHOUT_LAYERS.items() if "moe" not in k and "expert" not in k}
    older["attention_head_dim"], older["rms_norm_eps"] = older.pop("head_dim"), 1e-5
    older |= {"hybrid_override_pattern": "M-M*-", "time_step_rank": 8}
    cfg = Config.from_json(older)
    assert cfg.layers_block_type == ("mamba", "mlp", "mamba", "attention", "mlp")
    assert (cfg.head_dim, cfg.layer_norm_epsilon) == (32, 1e-5)
    told = r"attention_head_dim = 32, head_dim = 64"
    refuses(told, older | {"head_dim": 64})


SPELLINGS = {
    "pattern": {"hybrid_override_pattern": "MEM*E-"},
    "list": {"layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mlp"]},
    "transformers": {
        "layers_block_type": [
            *("linear_attention", "moe", "linear_attention", "full_attention", "moe", "mlp")
        ]
    },
    "both": {"layers_block_type": TINY["layers_block_type"], "hybrid_override_pattern": "MEM*E-"},
}


@pytest.mark.parametrize("count", [None, 6], ids=["no-count", "count"])
@pytest.mark.parametrize("layers", SPELLINGS.values(), ids=SPELLINGS)
def test_layers_in_every_spelling_D22(layers: dict[str, Any], count: int | None) -> None:
    assert set(LETTERS) == set("ME*-")
    assert Config.from_json(WITHOUT_LAYERS | layers | {"num_hidden_layers": count}) == Config.tiny()


LAYER_FAULTS = {
    "unknown-letter": (
        {"hybrid_override_pattern": "MEX*E-"},
        r"hybrid_override_pattern = 'MEX\*E-', unknown = \['X'\], known = \['M', '\*', 'E', '-'\]",
    ),
    "unknown-kind": (
        {"layers_block_type": ["mamba", "conv"]},
        r"layers_block_type = \['conv', 'mamba'\], known = \['mamba', 'attention', 'moe', 'mlp'\]",
    ),
    "count-too-large": (
        {"hybrid_override_pattern": "MEM*E-", "num_hidden_layers": 7},
        "num_hidden_layers = 7, layers_given = 6",
    ),
    "count-too-small": (
        {"layers_block_type": ["mamba", "moe", "mamba"], "num_hidden_layers": 2},
        "num_hidden_layers = 2, layers_given = 3",
    ),
    "two-stories": (
        {"hybrid_override_pattern": "MM", "layers_block_type": ["mamba", "moe"]},
        r"hybrid_override_pattern = 'MM', layers_block_type = \['mamba', 'moe'\]",
    ),
    "none": ({}, "missing key 'layers_block_type'"),
    "no-list": ({"layers_block_type": "MEM"}, "layers_block_type = 'MEM'"),
    "no-string": ({"hybrid_override_pattern": 6}, r"hybrid_override_pattern = 6, unknown = \['6'"),
}


@pytest.mark.parametrize(("layers", "told"), LAYER_FAULTS.values(), ids=LAYER_FAULTS)
def test_faults_of_layers_D22(layers: dict[str, Any], told: str) -> None:
    refuses(told, WITHOUT_LAYERS | layers)


LIMITS = {
    "absent": (None, (0.0, math.inf)),
    "infinite": ([0.0, math.inf], (0.0, math.inf)),
    "as-a-large-number": ([0, 1e308], (0.0, math.inf)),
    "as-transformers-writes": ([0.0, {"__float__": "Infinity"}], (0.0, math.inf)),
    "real": ([0.001, 0.1], (0.001, 0.1)),
    "lower": ([0.001, math.inf], (0.001, math.inf)),
}


@pytest.mark.parametrize(("given", "limits"), LIMITS.values(), ids=LIMITS)
def test_time_step_limits_D12(given: Any, limits: tuple[float, float]) -> None:
    """time_step_limit alone clamps; min, max and floor are a matter of initialisation."""
    raw = TINY | {"time_step_min": 0.5, "time_step_max": 0.6, "time_step_floor": 0.7}
    cfg = Config.from_json(raw | {"time_step_limit": given})
    assert cfg.time_step_limit == limits
    text = json.dumps(cfg.to_json(), allow_nan=False)
    assert Config.from_json(json.loads(text)) == cfg


@pytest.mark.parametrize(
    "given", [[0.1, 0.001], [-1.0, 1.0], [0.1], 0.1, [math.nan, 1.0], [0.0, {"__float__": "x"}]]
)
def test_other_time_step_limits_are_refused_D12(given: Any) -> None:
    refuses("time_step_limit", TINY | {"time_step_limit": given})


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "auto"])
def test_a_narrow_state_is_refused_D01(dtype: str) -> None:
    """Both values are told. A config that says nothing means float32, too."""
    told = f"mamba_ssm_cache_dtype = '{dtype}'; only 'float32' is known"
    refuses(told, TINY | {"mamba_ssm_cache_dtype": dtype})
    assert Config.tiny(mamba_ssm_cache_dtype="float32") == Config.tiny()


@pytest.mark.parametrize("key", FIXED)
def test_fixed_key_with_another_value(key: str) -> None:
    only = FIXED[key]
    other = {bool: not only, int: 2, str: "other", type(None): 4096}[type(only)]
    refuses(rf"{key} = {other!r}; only {only!r} is known", TINY | {key: other})
    assert Config.from_json(TINY | {key: only}) == Config.tiny()


@pytest.mark.parametrize("raw", [TINY, NANO, LIGHTNING, SUPER], ids=range(4))
def test_unknown_key_is_named_with_the_nearest(raw: dict[str, Any]) -> None:
    told = r"my\.json: unknown key 'n_group_s' = 8; did you mean 'n_groups'\?"
    with pytest.raises(ValueError, match=told):
        Config.from_json(raw | {"n_group_s": 8}, "my.json")


CONTRADICTIONS = {
    "norms": ({"norm_eps": 1e-6}, "norm_eps = 1e-06, layer_norm_epsilon = 1e-05"),
    "scan-groups-D11": ({"n_groups": 3}, "mamba_num_heads = 8, n_groups = 3"),
    "key-heads-D11": (
        {"num_attention_heads": 32, "num_key_value_heads": 29},
        "num_attention_heads = 32, num_key_value_heads = 29",
    ),
    "experts": ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9, n_routed_experts = 8"),
    "no-expert": ({"num_experts_per_tok": 0}, "num_experts_per_tok = 0, n_routed_experts = 8"),
    "no-width": ({"moe_intermediate_size": 0}, r"intermediate_size = \(0, 96\)"),
    "no-mlp-width": ({"intermediate_size": 0}, "intermediate_size = 0"),
    "type": ({"hidden_size": "128"}, "hidden_size"),
}


@pytest.mark.parametrize(("change", "told"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions(change: dict[str, Any], told: str) -> None:
    refuses(told, TINY | change)


@pytest.mark.parametrize("key", SIZES)
def test_sizes_are_at_least_one(key: str) -> None:
    refuses(f"{key} = 0", TINY | {key: 0})


def test_norm_eps_alone_is_the_epsilon() -> None:
    raw = {key: value for key, value in TINY.items() if key != "layer_norm_epsilon"}
    assert Config.from_json(raw | {"norm_eps": 1e-5}) == Config.tiny()
    refuses("missing key 'layer_norm_epsilon'", raw)


EXPERT = "backbone.layers.1.mixer.experts.{}.up_proj"
QUANTIZATION = {
    "algorithm": ({"quant_algo": "INT4_AWQ"}, "quant_algo = 'INT4_AWQ'; known: FP8, NVFP4"),
    "method": ({"quant_method": "gptq"}, "quant_method = 'gptq'"),
    "key": ({"quant_algos": "FP8"}, "unknown key 'quant_algos' = 'FP8'"),
    "nothing-mixed": ({"quant_algo": "MIXED_PRECISION"}, "needs quantized_layers"),
    "group": ({"quant_algo": "NVFP4", "group_size": 32}, "group_size = 32, NVFP4 has groups of 16"),
    "cache": ({"quant_algo": "FP8", "kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo = 'INT8'"),
    "two-stories": (
        {"quant_algo": "FP8", "quantized_layers": {"lm_head": {"quant_algo": "FP8"}}},
        "quantized_layers and quant_algo",
    ),
    "experts-D21": (
        {
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                EXPERT.format(e): {"quant_algo": "FP8" if e == 5 else "NVFP4"} for e in range(8)
            },
        },
        r"experts\.0\.up_proj = 'nvfp4', layers\.1\.mixer\.experts\.5\.up_proj = 'fp8_tensor'",
    ),
}


@pytest.mark.parametrize(("change", "told"), QUANTIZATION.values(), ids=QUANTIZATION)
def test_faults_of_quantization(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Model(Config.from_json(TINY | {"quantization_config": change}))


FORMS = {"tiny": TINY, "nano": NANO, "lightning": LIGHTNING, "super": SUPER}


@pytest.mark.parametrize("raw", FORMS.values(), ids=FORMS)
def test_written_form_is_read_back(raw: dict[str, Any]) -> None:
    cfg = Config.from_json(raw)
    written = json.loads(json.dumps(cfg.to_json(), allow_nan=False))
    assert Config.from_json(written) == cfg
    assert written["num_hidden_layers"] == len(cfg.layers_block_type)
    assert written["model_type"] == "nemotron_h"


@pytest.mark.parametrize("raw", FORMS.values(), ids=FORMS)
def test_transformers_own_form(raw: dict[str, Any]) -> None:
    """What transformers itself makes of the released files, and of what we write."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, "NemotronHConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no NemotronHConfig")
    cfg = Config.from_json(raw)
    for given in (raw, json.loads(json.dumps(cfg.to_json()))):
        written = transformers.NemotronHConfig(**given).to_dict()
        assert set(written["layers_block_type"]) >= {"linear_attention", "full_attention"}
        assert Config.from_json(written) == cfg
