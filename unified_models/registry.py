"""A model is a file: every module in `unified_models.models` is an architecture, found by its name."""

import difflib
import importlib
import pkgutil
from types import ModuleType

from unified_models import models


def architectures() -> list[str]:
    """Names of all architectures, which are the `model_type` of their config.json."""
    return sorted(module.name for module in pkgutil.iter_modules(models.__path__))


def find(name: str) -> ModuleType:
    """The model file of that name: a module with `Config`, `Model` and `NAMES`."""
    known = architectures()
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown architecture {name!r}; known: {', '.join(known)}{hint}")
    return importlib.import_module(f"{models.__name__}.{name}")
