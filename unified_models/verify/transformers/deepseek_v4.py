"""DeepSeek-V4 in transformers' spelling."""

from collections.abc import Mapping
from typing import Any

from unified_models.verify.transformers.translation import Translation

KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention"}


def config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Without the experts' number format; and what the released form cannot say there, entries of another stride than
    4 and 128, in their own keys."""
    raw = {key: value for key, value in raw.items() if key != "expert_dtype"}
    ratios = raw.get("compress_ratios", ())[: raw["num_hidden_layers"]]
    wide = {ratio for ratio in ratios if ratio not in KINDS}
    if wide <= {128}:
        return raw
    if len(wide) > 1:
        raise ValueError(
            f"compress_ratios: transformers has one heavily compressed ratio, not {sorted(wide)}"
        )
    del raw["compress_ratios"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": wide.pop()}
    return raw | {
        "layer_types": [KINDS.get(ratio, "heavily_compressed_attention") for ratio in ratios],
        "compress_rates": rates,
    }


TRANSLATION = Translation(config=config)
