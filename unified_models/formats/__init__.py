"""Number formats, each with one exact rule: weights, activations, and the records that slots keep."""

from unified_models.formats.kinds import Format, Input, Packed
from unified_models.formats.records import (
    BFLOAT16_RECORD,
    FLOAT32_RECORD,
    LatentFP8,
    PlainRecord,
    Record,
    StaticFP8,
    TailRecord,
    VectorFP8,
    round_trip,
)
from unified_models.formats.weights import FORMATS, accepts, find, pack_pieces

__all__ = [
    "BFLOAT16_RECORD",
    "FLOAT32_RECORD",
    "FORMATS",
    "Format",
    "Input",
    "LatentFP8",
    "Packed",
    "PlainRecord",
    "Record",
    "StaticFP8",
    "TailRecord",
    "VectorFP8",
    "accepts",
    "find",
    "pack_pieces",
    "round_trip",
]
