"""vLLM's worker, which keeps no lists of sampled tokens for `Checks`, which reads none."""

from typing import Any

from vllm.platforms import current_platform

ASKED = "logitsprocs_need_output_token_ids"
"""What vLLM's V1 runner tells its batch beside any logits processor of a caller. In the middle of a step it then waits
for the tokens of the step before, and writes each into its request's list."""


def parent() -> Any:
    """The worker that vLLM itself takes on this platform."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


class UnifiedWorker(parent()):  # type: ignore[misc]
    """Named by `config.Hook`, where no other worker was asked for."""

    def init_device(self) -> None:
        """As vLLM's, which makes the runner and its batch. A later batch, for other groups of caches, is told what this
        one was; the V2 runner tells none."""
        super().init_device()
        batch = getattr(self.model_runner, "input_batch", None)
        if hasattr(batch, ASKED):
            setattr(batch, ASKED, False)
