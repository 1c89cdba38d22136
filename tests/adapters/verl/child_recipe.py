"""verl's PPO recipe with model_engine=unified: `python child_recipe.py FOLDER`, where FOLDER is a checkpoint.

Nothing of ours is imported here: the recipe itself has to find the engine.
"""

import json
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.engine import EngineRegistry


def recipe(folder: Path) -> Any:
    """verl's PPO recipe with model_engine=unified: what it composes, and the engine that it names."""
    with initialize_config_module("verl.trainer.config", version_base=None):
        config = compose(
            "ppo_trainer",
            overrides=[
                "hydra.searchpath=[pkg://unified_models.adapters.verl.recipe]",
                "model_engine=unified",
                "rollout@actor_rollout_ref.rollout=unified",
                "actor_rollout_ref.actor.engine.check=report",
                "actor_rollout_ref.actor.engine.provider=vllm_v2",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
                f"actor_rollout_ref.model.path={folder}",
                "+actor_rollout_ref.model.load_tokenizer=false",
            ],
        )
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    ref = omega_conf_to_dataclass(config.actor_rollout_ref.ref.engine)
    model = omega_conf_to_dataclass(config.actor_rollout_ref.model)
    rollout = omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
    made = EngineRegistry.new(
        model_type=model.model_type,
        backend=actor.engine.strategy,
        model_config=model,
        engine_config=actor.engine,
        optimizer_config=actor.optim,
        checkpoint_config=actor.checkpoint,
    )
    return {
        "strategy": actor.strategy,
        "engine": [type(made).__module__, actor.engine.check, actor.engine.provider],
        "ref": [type(ref).__name__, ref.forward_only, ref.provider],
        "optimizer": type(actor.optim).__name__,
        "critic": config.critic._target_,
        "rollout": [
            rollout.name,
            rollout.calculate_log_probs,
            rollout.load_format,
            rollout.logprobs_mode,
            rollout.enforce_eager,
            rollout.free_cache_engine,
            rollout.engine_kwargs["vllm"],
        ],
    }


if __name__ == "__main__":
    print(json.dumps(recipe(Path(sys.argv[1]))))
