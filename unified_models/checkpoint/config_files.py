"""The JSON files beside the tensors: config.json, and what ModelOpt writes beside it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unified_models.config import load_json
from unified_models.quantization import (
    Quantization,
    hf_quant_config,
    is_modelopt,
    quantization_config,
)

CONFIG = "config.json"
QUANT_CONFIG = "hf_quant_config.json"
KEY = "quantization_config"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json, with the `quantization_config` that hf_quant_config.json stands for where it has none of its own.

    Raises ValueError where both are there and do not agree, naming both and the first module or key that differs.
    """
    raw = load_json(folder / CONFIG)
    path = folder / QUANT_CONFIG
    if not path.exists():
        return raw
    beside = quantization_config(load_json(path), str(path))
    own = raw.get(KEY)
    if own is None:
        return raw | {KEY: beside}
    if not is_modelopt(own):
        raise ValueError(
            f"{folder / CONFIG}: {KEY} is of another method than ModelOpt's "
            f"({own.get('quant_method') if isinstance(own, Mapping) else own!r}), and {path} is there, too"
        )
    one = Quantization.from_json(own, str(folder / CONFIG))
    other = Quantization.from_json(beside, str(path))
    difference = one.difference(other)
    if difference is not None:
        what, mine, theirs = difference
        raise ValueError(
            f"{folder / CONFIG} and {path} differ: {what} is {mine!r} in the one, {theirs!r} in the other"
        )
    return raw


def write_config(folder: Path, raw: Mapping[str, Any]) -> None:
    """config.json; and hf_quant_config.json where it has ModelOpt's settings, for readers that look there only."""
    (folder / CONFIG).write_text(json.dumps(raw, indent=2) + "\n")
    own = raw.get(KEY)
    if own is not None and is_modelopt(own):
        text = json.dumps(hf_quant_config(own), indent=2) + "\n"
        (folder / QUANT_CONFIG).write_text(text)
