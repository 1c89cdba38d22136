"""The embedded engine: continuous batching over paged memory, for tests, quick starts and RL on one device."""

from unified_models.engine.engine import Engine
from unified_models.engine.request import Output, Request
from unified_models.engine.sampling import Sampling
from unified_models.engine.stats import Stats

__all__ = ["Engine", "Output", "Request", "Sampling", "Stats"]
