"""What a recipe may set, and what of verl's settings this engine refuses."""

from dataclasses import dataclass
from typing import Any

from verl.workers.config import EngineConfig

from unified_models.adapters.verl.check import MODES
from unified_models.ops.logprob import check_provider
from unified_models.training import ROWS

CONTENTS = ("model", "optimizer", "extra", "hf_model")


@dataclass
class UnifiedEngineConfig(EngineConfig):  # type: ignore[misc]
    """verl's settings of every engine, and ours.

    check: "stop" ends the run where a rollout logprob has other bits than the training forward's, "report" tells and
    goes on, "off" compares nothing. provider: the sampler's arithmetic, as in `um.logprobs`. rows: of logits held at
    once. packed: as in `fsdp.wrap`, where there are several processes.
    """

    strategy: str = "unified"
    check: str = "stop"
    provider: str = "torch_row"
    rows: int = ROWS
    packed: str = "resident"

    def __post_init__(self) -> None:
        """ValueError: a value that is not known."""
        super().__post_init__()
        if self.check not in MODES:
            raise ValueError(f"check must be one of {', '.join(MODES)}, got {self.check!r}")
        check_provider(self.provider)


def refuse_settings(model: Any, engine: Any, checkpoint: Any, processes: int) -> None:
    """ValueError naming a setting of verl's that this engine would not follow.

    model, engine, checkpoint: HFModelConfig, UnifiedEngineConfig, CheckpointConfig. processes: of the run.
    """
    if not isinstance(engine, UnifiedEngineConfig):
        raise ValueError(
            f"engine config is a {type(engine).__name__}, expected UnifiedEngineConfig: "
            "set engine._target_ to unified_models.adapters.verl.UnifiedEngineConfig"
        )
    off = {
        "model.lora_rank": (model.lora_rank, 0),
        "model.lora_adapter_path": (model.lora_adapter_path, None),
        "model.mtp.enable": (model.mtp.enable, False),
        "model.enable_activation_offload": (model.enable_activation_offload, False),
        "engine.router_replay.mode": (engine.router_replay.mode, "disabled"),
        "checkpoint.async_save": (checkpoint.async_save, False),
        "checkpoint.save_lora_only": (checkpoint.save_lora_only, False),
    }
    if processes > 1:
        off["engine.param_offload, in several processes"] = (engine.param_offload, False)
        off["engine.optimizer_offload, in several processes"] = (engine.optimizer_offload, False)
    for name, (value, neutral) in off.items():
        if value != neutral:
            raise ValueError(f"{name} = {value!r}: the unified engine knows {neutral!r} only")
    for name in ("save_contents", "load_contents"):
        unknown = set(getattr(checkpoint, name)) - set(CONTENTS)
        if unknown:
            raise ValueError(
                f"checkpoint.{name} has {sorted(unknown)}, expected some of {CONTENTS}"
            )
    if processes > 1 and "hf_model" in checkpoint.save_contents:
        raise ValueError(
            f"checkpoint.save_contents has 'hf_model' with {processes} processes: one process only"
        )
