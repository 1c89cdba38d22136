"""unified_models: one file for each architecture, run unchanged as a rollout model and as a training module, with
bit-identical logprobs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unified_models import verify
    from unified_models.checkpoint import load, named_tensors, save
    from unified_models.engine import Engine, Sampling
    from unified_models.fingerprint import Fingerprint
    from unified_models.registry import architectures
    from unified_models.tiny import make_tiny
    from unified_models.training import logprobs

__version__ = "0.1.0"

_WHERE = {
    "Engine": "engine",
    "Sampling": "engine",
    "Fingerprint": "fingerprint",
    "architectures": "registry",
    "load": "checkpoint",
    "logprobs": "training",
    "make_tiny": "tiny",
    "named_tensors": "checkpoint",
    "save": "checkpoint",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `import unified_models` is light."""
    if name == "verify":
        return import_module("unified_models.verify")
    if name not in _WHERE:
        raise AttributeError(f"module 'unified_models' has no attribute {name!r}")
    return getattr(import_module(f"unified_models.{_WHERE[name]}"), name)


__all__ = [
    "Engine",
    "Fingerprint",
    "Sampling",
    "architectures",
    "load",
    "logprobs",
    "make_tiny",
    "named_tensors",
    "save",
    "verify",
]
