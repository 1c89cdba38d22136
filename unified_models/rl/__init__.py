"""A GRPO recipe over the zoo: rollouts, training steps and the bits of every sampled token compared on the way."""

from unified_models.rl.config import Config, read_config
from unified_models.rl.recipe import run

__all__ = ["Config", "read_config", "run"]
