"""verl's engine "unified": our training forward under a verl recipe, compared with the rollout before every update.

Importing this registers it: a recipe's `engine._target_` does, or VERL_USE_EXTERNAL_MODULES set to this module's name.
"""

from unified_models.adapters.verl.engine import UnifiedEngine
from unified_models.adapters.verl.settings import UnifiedEngineConfig

__all__ = ["UnifiedEngine", "UnifiedEngineConfig"]
