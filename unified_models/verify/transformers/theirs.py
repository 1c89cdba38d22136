"""The same model as transformers has it: built from a checkpoint of our values, which it reads by itself."""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from unified_models.checkpoint import save
from unified_models.checkpoint.names import Names
from unified_models.model import LanguageModel
from unified_models.verify.transformers import deepseek_v4, nemotron_h
from unified_models.verify.transformers.translation import Translation

TRANSLATIONS: Mapping[str, Translation] = {
    "deepseek_v4": deepseek_v4.TRANSLATION,
    "nemotron_h": nemotron_h.TRANSLATION,
}
"""By model_type; one that is not here needs none."""
SCALES = re.compile(r"\.(input|k|v)_scale$")
"""Of quantised activations and caches, which float32 has not."""


def installed() -> Any:
    """transformers, or one clear line."""
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "transformers is not installed; pip install 'unified_models[transformers]'"
        ) from None
    return transformers


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without its progress bars and warnings."""
    log = transformers.utils.logging
    shown, level = log.is_progress_bar_enabled(), log.get_verbosity()
    log.disable_progress_bar()
    log.set_verbosity_error()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if shown:
            log.enable_progress_bar()


def theirs_of(transformers: Any, model: LanguageModel, folder: Path) -> nn.Module:
    """Their model of the same values, through a checkpoint of float32 masters.

    Raises ValueError where transformers leaves a tensor out, or makes one up.
    """
    save(model, folder, masters=True)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    translation = TRANSLATIONS.get(raw["model_type"], Translation())
    raw.pop("quantization_config", None)
    path.write_text(json.dumps(translation.config(raw)))
    kind = transformers.AutoModelForCausalLM
    theirs, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    info["unexpected_keys"] = [name for name in info["unexpected_keys"] if not SCALES.search(name)]
    left = {key: sorted(names) for key, names in info.items() if names}
    if left:
        raise ValueError(f"{folder}: transformers did not load the checkpoint whole: {left}")
    translation.prepare(theirs)
    return theirs.eval()  # type: ignore[no-any-return]


@torch.no_grad()
def gradients(theirs: Any, names: Names, folder: Path) -> dict[str, Tensor]:
    """By checkpoint name: transformers itself writes them, in the place of its parameters, in a spelling that we
    read."""
    for parameter in theirs.parameters():
        grad = parameter.grad
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    theirs.save_pretrained(folder)
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.offset_keys():
                found[names.by_name[name].name] = tensors.get_tensor(name)
    return found
