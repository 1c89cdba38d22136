"""Verification: two ways of doing the same thing, compared bit for bit, and able to fail."""

from unified_models.verify.compare import Comparison, Gap, UnequalError, bits, gap, require_equal
from unified_models.verify.control import control
from unified_models.verify.lengths import default_lengths
from unified_models.verify.locate import Difference, locate
from unified_models.verify.report import Report
from unified_models.verify.rollout import Rollout, against_training
from unified_models.verify.run import verify_folder
from unified_models.verify.trace import Fault, Trace, recording
from unified_models.verify.transformers import Parity, against_transformers

__all__ = [
    "Comparison",
    "Difference",
    "Fault",
    "Gap",
    "Parity",
    "Report",
    "Rollout",
    "Trace",
    "UnequalError",
    "against_training",
    "against_transformers",
    "bits",
    "control",
    "default_lengths",
    "gap",
    "locate",
    "recording",
    "require_equal",
    "verify_folder",
]
