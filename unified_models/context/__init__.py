"""The execution context. A model file imports from here and from ops, and nothing else of the house."""

from unified_models.context.interface import Context, Experts, Pool, cache_scale
from unified_models.context.slots import Entries, Rows, State
from unified_models.formats import (
    BFLOAT16_RECORD,
    FLOAT32_RECORD,
    LatentFP8,
    StaticFP8,
    VectorFP8,
)
from unified_models.ops.rope import Rope
from unified_models.weight import Table, Weight

__all__ = [
    "BFLOAT16_RECORD",
    "FLOAT32_RECORD",
    "Context",
    "Entries",
    "Experts",
    "LatentFP8",
    "Pool",
    "Rope",
    "Rows",
    "State",
    "StaticFP8",
    "Table",
    "VectorFP8",
    "Weight",
    "cache_scale",
]
