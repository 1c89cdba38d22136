"""The formats of a released checkpoint that has several."""

from collections.abc import Sequence
from typing import Any


def released(layers: Sequence[str], experts: int = 8) -> dict[str, Any]:
    """The quantization_config of Nemotron-3.5-Lightning's NVFP4 release, for these layers and as many experts: FP8
    around the scan, four bits for experts and head, attention as it is, an FP8 cache."""
    fp8, fp4 = {"quant_algo": "FP8"}, {"quant_algo": "W4A16_NVFP4", "group_size": 16}
    entries: dict[str, Any] = {}
    excluded = ["backbone.embeddings", "mtp*"]
    for number, kind in enumerate(layers):
        at = f"backbone.layers.{number}.mixer"
        if kind == "mamba":
            entries |= {f"{at}.{name}": fp8 for name in ("in_proj", "out_proj")}
            excluded.append(f"{at}.conv1d")
        elif kind == "attention":
            excluded += [f"{at}.{name}_proj" for name in "qkvo"]
        elif kind == "moe":
            owners = [*(f"experts.{e}" for e in range(experts)), "shared_experts"]
            entries |= {f"{at}.{o}.{w}_proj": fp4 for o in owners for w in ("up", "down")}
            excluded.append(f"{at}.gate")
    return {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "quantized_layers": entries | {"lm_head": fp4},
        "ignore": excluded,
        "producer": {"name": "modelopt", "version": "0.44.0rc5"},
    }
