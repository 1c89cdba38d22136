"""One process of a trainer that is cut over several: it holds its part, and does what it is told in turn with the
others."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unified_models.adapters.fsdp.gathering import named_tensors
from unified_models.adapters.fsdp.gradients import clip
from unified_models.adapters.fsdp.state import load, save
from unified_models.adapters.fsdp.wrap import wrap
from unified_models.context.parallel import Parallel
from unified_models.model import LanguageModel
from unified_models.rl.config import Config
from unified_models.rl.recipe import load_start
from unified_models.rl.trainer import adamw
from unified_models.training import logprobs

Arrays = list[np.ndarray[Any, np.dtype[np.float32]]]
"""Float32 [length - 1] for each sequence: plain memory, which any process may be sent."""


class Member:
    """A model of `config` in this process of a process group: masters cut over all, experts over `train.experts`
    neighbours, a pack over `train.tokens`. Every method is collective.

    folder: of the run; the checkpoint that training starts from lies there.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        self.train = config.train
        spread, self.parallel, same = groups(self.train.experts, self.train.tokens)
        self.model: LanguageModel = load_start(config, folder, experts=spread)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        wrap(self.model, mesh, packed=self.train.packed, experts_mesh=same)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.lps: Tensor | None = None
        self.restart(0.0, 0.0)

    def restart(self, lr: float, weight_decay: float) -> None:
        """A fresh optimizer."""
        self.optimizer = adamw(self.model, self.trained, lr, weight_decay)

    def forward(
        self, sequences: Sequence[Sequence[int]], temperature: float, training: bool
    ) -> Arrays:
        """Logprobs of this process's sequences; if training, with a graph that is kept for `backward`."""
        with torch.set_grad_enabled(training):
            lps = logprobs(
                self.model,
                sequences or [[]],
                temperature,
                recompute=self.train.recompute,
                parallel=self.parallel,
            )
        self.lps = torch.cat(lps) if training else None
        return [lp.detach().numpy() for lp in lps[: len(sequences)]]

    def backward(self, grads: Arrays) -> None:
        """Of the last forward, with the loss's gradients of its logprobs."""
        # A process without sequences takes part, too: its experts, or its shards, are the others'.
        given = np.concatenate([np.zeros(0, np.float32), *grads])
        lps, self.lps = self.lps, None
        assert lps is not None, "no forward to go back through"
        lps.backward(torch.from_numpy(given))

    def step(self) -> float:
        """One optimizer step on the gradients so far; their norm before clipping."""
        norm = clip(self.trained, self.train.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def forget(self) -> None:
        """Leave a step that was begun."""
        self.lps = None
        self.optimizer.zero_grad()

    def tensors(self) -> Iterator[tuple[str, Any]]:
        """(checkpoint name, array) of everything that a forward reads, one at a time."""
        for name, tensor in named_tensors(self.model, self.parallel):
            yield name, tensor.numpy()

    def save(self, folder: str) -> None:
        """Masters and the optimizer's state, as shards."""
        save(folder, self.model, self.optimizer)

    def load(self, folder: str) -> None:
        """What `save` wrote, in this or in another number of processes. Learning rate and weight decay stay those of
        `restart`."""
        kept = [(group["lr"], group["weight_decay"]) for group in self.optimizer.param_groups]
        load(folder, self.model, self.optimizer)
        for group, (lr, decay) in zip(self.optimizer.param_groups, kept, strict=True):
            group["lr"], group["weight_decay"] = lr, decay


def groups(experts: int, tokens: int) -> tuple[tuple[int, int], Parallel, DeviceMesh | None]:
    """Of all processes: (rank, size) among those that share the experts, the groups of neighbours, and the mesh of the
    processes with the same experts."""
    size = dist.get_world_size()

    def cut(width: int) -> DeviceMesh | None:
        if width == 1:
            return None
        return init_device_mesh("cpu", (size // width, width), mesh_dim_names=("outer", "inner"))

    spread, stretches = cut(experts), cut(tokens)
    parallel = Parallel(
        experts=None if spread is None else spread["inner"].get_group(),
        tokens=None if stretches is None else stretches["inner"].get_group(),
    )
    same = None if spread is None else spread["outer"]
    return (dist.get_rank() % experts, experts), parallel, same
