"""The zoo's models under FSDP2: one line wraps one, and its forward keeps its bits."""

from unified_models.adapters.fsdp.export import export
from unified_models.adapters.fsdp.gathering import named_tensors
from unified_models.adapters.fsdp.state import load, save, save_async
from unified_models.adapters.fsdp.wrap import wrap

__all__ = ["export", "load", "named_tensors", "save", "save_async", "wrap"]
