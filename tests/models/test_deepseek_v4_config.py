"""The configuration of DeepSeek-V4: both written forms, the released file, and every refusal with its values."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from unified_models.config import load_json
from unified_models.model import bind_numerics
from unified_models.models.deepseek_v4 import FIXED, TINY, Config, Model

ROOT = Path(__file__).parent.parent.parent
FLASH = load_json(ROOT / "configs/deepseek_v4_flash.json")

# The tiny configuration as transformers writes it: layer kinds by name, one rope for each kind, no MTP entry.
NORMALISED: dict[str, Any] = {
    key: value
    for key, value in TINY.items()
    if key not in ("compress_ratios", "num_hash_layers", "rope_theta", "compress_rope_theta")
    and key not in ("rope_scaling", "qk_rope_head_dim")
} | {
    "model_type": "deepseek_v4",
    "layer_types": [
        "sliding_attention",
        "sliding_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "compressed_sparse_attention",
        "heavily_compressed_attention",
    ],
    "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 3,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "main": {"rope_type": "default", "rope_theta": 10000.0},
        "compress": {
            "rope_type": "yarn",
            "rope_theta": 160000.0,
            "factor": 16.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "original_max_position_embeddings": 256,
        },
    },
}


def without_drafts(cfg: Config) -> dict[str, Any]:
    """What the forward is made of: the ratios of its layers, and the ropes."""
    kept = dict(vars(cfg))
    kept["compress_ratios"] = tuple(cfg.compress_ratios[: cfg.num_hidden_layers])
    kept["rope_scaling"] = [cfg.rope(ratio) for ratio in (0, 4, 128)]
    return kept


def test_released_layers() -> None:
    """V4-Flash: 2 window-only, 21 sparse, 20 heavily compressed layers; the first three choose experts by hash."""
    cfg = Config.from_json(FLASH)
    kinds = Counter(cfg.compress_ratios[: cfg.num_hidden_layers])
    assert kinds == {0: 2, 4: 21, 128: 20}
    assert (cfg.num_hidden_layers, cfg.num_hash_layers, cfg.index_topk) == (43, 3, 512)
    assert (cfg.linear_format, cfg.expert_format) == ("fp8", "mxfp4")
    assert (cfg.rope(0).theta, cfg.rope(4).theta, cfg.rope(128).theta) == (1e4, 1.6e5, 1.6e5)
    assert (cfg.rope(0).factor, cfg.rope(4).factor) == (None, 16)
    assert cfg.rope(4) == cfg.rope(128)


def test_rope_without_scaling() -> None:
    """The base still depends on the layer kind; nothing is stretched."""
    cfg = Config.tiny(rope_scaling={})
    assert [(cfg.rope(r).theta, cfg.rope(r).factor) for r in (0, 4, 128)] == [
        (1e4, None),
        (1.6e5, None),
        (1.6e5, None),
    ]


def test_both_forms_are_one_configuration() -> None:
    official, other = Config.from_json(TINY), Config.from_json(NORMALISED)
    assert without_drafts(official) == without_drafts(other)


def test_transformers_own_form() -> None:
    """What transformers itself makes of the released file."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepseekV4Config")
    written = transformers.DeepseekV4Config(**FLASH).to_dict()
    assert "layer_types" in written
    assert without_drafts(Config.from_json(written)) == without_drafts(Config.from_json(FLASH))


def test_unknown_key_is_named_with_the_nearest() -> None:
    for raw in (TINY, NORMALISED, FLASH):
        told = r"my\.json: unknown key 'swiglu_limits' = 9; did you mean 'swiglu_limit'\?"
        with pytest.raises(ValueError, match=told):
            Config.from_json(raw | {"swiglu_limits": 9}, "my.json")


@pytest.mark.parametrize("key", FIXED)
def test_fixed_key_with_another_value(key: str) -> None:
    """Both values are told."""
    only = FIXED[key]
    other = {bool: not only, int: 2, str: "other"}[type(only)]
    with pytest.raises(ValueError, match=rf"{key} = {other!r}; only {only!r} is known"):
        Config.from_json(TINY | {key: other})
    assert Config.from_json(TINY | {key: only}) == Config.tiny()


@pytest.mark.parametrize("key", ["hidden_size", "compress_ratios", "index_topk"])
def test_missing_key_is_named(key: str) -> None:
    with pytest.raises(ValueError, match=f"missing key '{key}'"):
        Config.from_json({k: v for k, v in TINY.items() if k != key})


CONTRADICTIONS = {
    "few-ratios": ({"compress_ratios": [0, 4]}, r"compress_ratios = \[0, 4\], num_hidden_layers"),
    "hash-layers": ({"num_hash_layers": 7}, "num_hash_layers = 7, num_hidden_layers = 6"),
    "groups": ({"o_groups": 3}, "num_attention_heads = 4, o_groups = 3"),
    "experts": ({"num_experts_per_tok": 9}, "num_experts_per_tok = 9, n_routed_experts = 8"),
    "rope": ({"qk_rope_head_dim": 256}, "qk_rope_head_dim = 256, of = 128"),
    "expert-dtype": ({"expert_dtype": "fp6"}, "expert_dtype = 'fp6'"),
    "type": ({"hidden_size": "256"}, r"hidden_size"),
}


@pytest.mark.parametrize(("change", "told"), CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_contradictions(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Config.from_json(TINY | change)


NORMALISED_FAULTS = {
    "kind": ({"layer_types": ["full_attention"] * 6}, "full_attention"),
    "mlp": ({"mlp_layer_types": ["dense"] * 6}, "dense"),
    "hash-after": ({"mlp_layer_types": ["moe", "hash_moe"] + ["moe"] * 4}, "mlp_layer_types"),
    "sparse-rate": ({"compress_rates": {"compressed_sparse_attention": 8}}, "compress_rates"),
}


@pytest.mark.parametrize(("change", "told"), NORMALISED_FAULTS.values(), ids=NORMALISED_FAULTS)
def test_faults_of_the_normalised_form(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Config.from_json(NORMALISED | change)


def test_unrotated_dims_come_in_whole_blocks_when_deployed() -> None:
    """FP8 records keep blocks of 64; both values are told. Without quantisation any size will do."""
    model = Model(Config.tiny(head_dim=96))
    with pytest.raises(ValueError, match=r"head_dim 96 - rope 64 = 32 is not a multiple"):
        bind_numerics(model, "deployed")
    bind_numerics(Model(Config.tiny(head_dim=96)), "float32")


def test_numerics_by_name() -> None:
    with pytest.raises(ValueError, match="'deployed' or 'float32', got 'bfloat16'"):
        bind_numerics(Model(Config.tiny()), "bfloat16")


FORMATS = {
    "none": ({"quantization_config": None}, "bfloat16", "bfloat16"),
    "fp8": ({"expert_dtype": "fp8"}, "fp8", "fp8"),
    "fp4": ({"expert_dtype": "fp4"}, "fp8", "mxfp4"),
    "file": ({"expert_dtype": None}, "fp8", None),
    "float32-scales": ({"quantization_config": {"quant_method": "fp8"}}, "fp8_float32", "fp8_floa"),
}


@pytest.mark.parametrize(("change", "linear", "experts"), FORMATS.values(), ids=FORMATS)
def test_formats(change: dict[str, Any], linear: str, experts: str | None) -> None:
    cfg = Config.tiny(**change)
    assert cfg.linear_format == linear
    assert (cfg.expert_format or "").startswith(experts or "")
    assert (cfg.expert_format is None) == (experts is None)
