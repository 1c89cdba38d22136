"""Nemotron-H in transformers: its scan takes time limits that are of the initialisation."""

from typing import Any

from unified_models.verify.transformers.translation import Translation


def prepare(theirs: Any) -> None:
    """Time steps within time_step_limit, as vLLM and Megatron have it: transformers raises them to time_step_min where
    it runs whole sequences, and only there."""
    for module in theirs.modules():
        if hasattr(module, "time_step_limit"):
            module.time_step_limit = tuple(theirs.config.time_step_limit)


TRANSLATION = Translation(prepare=prepare)
