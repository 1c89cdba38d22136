"""In-place weight updates: `LLM(..., weight_transfer_config={"backend": "unified"})` and `update_weights`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from unified_models.checkpoint.shards import some
from unified_models.checkpoint.sync import digests
from unified_models.model import LanguageModel


@dataclass
class Init(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand."""


@dataclass
class Update(WeightTransferUpdateInfo):  # type: ignore[misc]
    """path: a safetensors file of masters, by their checkpoint names. digests: what the trainer's forward reads, as
    `checkpoint.sync.digests` tells; empty: not compared."""

    path: str = ""
    digests: dict[str, str] = field(default_factory=dict)


class FileTransfer(WeightTransferEngine):  # type: ignore[misc]
    """The trainer writes a file, every worker reads it: all of it is checked before the first byte changes."""

    init_info_cls = Init
    update_info_cls = Update
    supports_draft_weight_update = False

    def init_transfer_engine(self, init_info: Init) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Weights change in place."""

    @torch.no_grad()
    def receive_weights(self, update_info: Update) -> None:
        """ValueError listing every problem; nothing has changed then. RuntimeError: what this process now reads is not
        what the trainer reads."""
        self.model.replace_weights(load_file(update_info.path).items())
        if update_info.digests:
            require_same(digests(self.model.model), update_info.digests)

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Asked for by vLLM 0.26; sending is this module's `update_weights`."""

    def finish_weight_update(self) -> None:
        """Packed bytes were derived as the masters came."""

    def shutdown(self) -> None:
        """Nothing is held."""


def require_same(here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """RuntimeError naming every tensor whose bytes differ from the trainer's."""
    wrong = sorted(name for name in here.keys() | there.keys() if here.get(name) != there.get(name))
    if wrong:
        raise RuntimeError(
            f"{len(wrong)} of {len(there)} tensors differ from the trainer's after the update: {some(wrong)}"
        )


def update_weights(
    llm: Any,
    named_tensors: Iterable[tuple[str, Tensor]],
    version: int | str,
    trainer: LanguageModel | None = None,
) -> None:
    """Replace the weights of a running `LLM`, between two of its steps.

    trainer: compare every tensor that the forward reads, packed bytes and tables, with what this model reads; a
    RuntimeError names those that differ.

    The prefix cache is dropped and running requests are preempted, so each is recomputed under the new weights before
    it samples again. vLLM's outputs then say which version sampled each token (`weight_versions`; 0.26 does not).
    Raises ValueError, as `checkpoint.update` does, before anything has changed.
    """
    with TemporaryDirectory() as folder:
        path = str(Path(folder, "masters.safetensors"))
        tensors = {name: t.detach().contiguous().clone() for name, t in named_tensors}
        save_file(tensors, path)
        expected = digests(trainer) if trainer is not None else {}
        llm.start_weight_update()
        llm.update_weights({"update_info": {"path": path, "digests": expected}})
        if not llm.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop its prefix cache; its rows are of other weights")
        tells = "weight_version" in signature(llm.finish_weight_update).parameters
        llm.finish_weight_update(**({"weight_version": str(version)} if tells else {}))
