"""Checkpoints: safetensors folders in and out, under official names, and the sync list between processes."""

from unified_models.checkpoint.changes import Change
from unified_models.checkpoint.loading import LoadReport, load
from unified_models.checkpoint.report import Report, describe, print_report
from unified_models.checkpoint.saving import save
from unified_models.checkpoint.sync import digests, named_tensors, update

__all__ = [
    "Change",
    "LoadReport",
    "Report",
    "describe",
    "digests",
    "load",
    "named_tensors",
    "print_report",
    "save",
    "update",
]
