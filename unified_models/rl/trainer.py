"""The side that learns: logprobs, optimizer steps, the tensors to sync, and a state to go on from."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from unified_models.checkpoint import named_tensors, update
from unified_models.context.local import LocalContext
from unified_models.model import LanguageModel
from unified_models.training import logprobs

FILE = "tensors.safetensors"
Sequences = Sequence[Sequence[int]]
Loss = Callable[[list[Tensor], range], Tensor]
"""(logprobs of the sequences of one forward, their places in the batch) -> its scalar part of the loss. What it raises
stops the step before any weight changes."""


@dataclass(frozen=True)
class StepResult:
    """loss: summed over micro-batches. grad_norm: of all gradients together, before clipping."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class State:
    """What a trainer in one process goes on from: tensors by name, and the weight version."""

    tensors: dict[str, Tensor]
    version: int


class Trainer(Protocol):
    """In one process or sharded; sequences and logprobs are those of `um.logprobs`."""

    version: int
    """optimizer steps since the checkpoint that training started from"""

    def logprobs(self, sequences: Sequences, temperature: float) -> list[Tensor]:
        """The training forward without gradient, in the micro-batches of a step."""

    def step(self, sequences: Sequences, temperature: float, loss: Loss) -> StepResult:
        """Forward, `loss` and backward of each micro-batch, then one optimizer step; the version grows by one."""

    def restart(self, lr: float, weight_decay: float = 0.0) -> None:
        """A fresh optimizer."""

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The sync list, as `um.named_tensors`."""

    def save(self, folder: Path) -> None:
        """Write masters and the optimizer's moments into a folder that exists."""

    def load(self, folder: Path, version: int) -> None:
        """Go on exactly from what `save` wrote, under that version; learning rate and weight decay stay those of
        `restart`. ValueError: it is of another model, or of another kind of trainer."""


def in_parts(count: int, size: int) -> Iterator[range]:
    """The places of each micro-batch of `size` sequences; size 0: all of them are one."""
    size = size or count
    return (range(at, min(at + size, count)) for at in range(0, count, size))


def adamw(
    model: LanguageModel, trained: Iterable[Tensor], lr: float, weight_decay: float
) -> torch.optim.AdamW:
    """A fresh AdamW (betas 0.9, 0.95) over masters of a model, which commits after each step."""
    optimizer = torch.optim.AdamW(
        list(trained), lr=lr, weight_decay=weight_decay, betas=(0.9, 0.95)
    )
    model.commit_after(optimizer)
    return optimizer


class LocalTrainer:
    """Trainer over a model in this process: AdamW on the float32 masters, packed weights committed after each step.

    micro_batch: sequences in one forward; 0: all. max_grad_norm: gradients are scaled to this norm where theirs is
    larger. context: the class that the forward runs under.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        micro_batch: int = 0,
        max_grad_norm: float = 1.0,
        context: Callable[..., Any] = LocalContext,
    ) -> None:
        self.model, self.version = model, 0
        self.micro_batch, self.max_grad_norm, self.context = micro_batch, max_grad_norm, context
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.restart(lr=0.0)

    def restart(self, lr: float, weight_decay: float = 0.0) -> None:
        """See Trainer."""
        self.optimizer = adamw(self.model, self.trained.values(), lr, weight_decay)

    @torch.no_grad()
    def logprobs(self, sequences: Sequences, temperature: float) -> list[Tensor]:
        """See Trainer."""
        places = in_parts(len(sequences), self.micro_batch)
        parts = (self._forward(sequences, at, temperature) for at in places)
        return [values for part in parts for values in part]

    def _forward(self, sequences: Sequences, places: range, temperature: float) -> list[Tensor]:
        return logprobs(
            self.model, [sequences[i] for i in places], temperature, context=self.context
        )

    def step(self, sequences: Sequences, temperature: float, loss: Loss) -> StepResult:
        """See Trainer."""
        self.optimizer.zero_grad()
        total = 0.0
        for places in in_parts(len(sequences), self.micro_batch):
            part = loss(self._forward(sequences, places, temperature), places)
            part.backward()
            total += float(part.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.trained.values(), self.max_grad_norm)
        self.optimizer.step()
        self.version += 1
        return StepResult(total, float(norm))

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See Trainer."""
        return named_tensors(self.model)

    def save(self, folder: Path) -> None:
        """See Trainer."""
        tensors = {name: tensor.contiguous() for name, tensor in self.state().tensors.items()}
        save_file(tensors, folder / FILE)

    def load(self, folder: Path, version: int) -> None:
        """See Trainer."""
        if not (folder / FILE).exists():
            raise ValueError(
                f"{folder}: no {FILE}: saved by a trainer of several processes, go on with train.processes above 1"
            )
        self.restore(State(load_file(folder / FILE), version))

    def state(self) -> State:
        """Copies of masters, tables and the optimizer's moments: `model/NAME` by checkpoint names, `adamw/FIELD/PATH`
        by module paths."""
        tensors = {f"model/{name}": tensor.clone() for name, tensor in self.named_tensors()}
        for path, parameter in self.trained.items():
            for field, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"adamw/{field}/{path}"] = value.detach().clone()
        return State(tensors, self.version)

    def restore(self, state: State) -> None:
        """Go on from a state; ValueError if it is of another model."""
        update(self.model, _under(state.tensors, "model/"))
        self.optimizer.state.clear()
        for name, value in _under(state.tensors, "adamw/"):
            field, _, path = name.partition("/")
            if path not in self.trained or field not in ("step", "exp_avg", "exp_avg_sq"):
                raise ValueError(f"adamw/{name}: this model trains no such parameter")
            self.optimizer.state[self.trained[path]][field] = value.clone()
        self.version = state.version


def _under(tensors: dict[str, Tensor], prefix: str) -> Iterable[tuple[str, Tensor]]:
    return ((n.removeprefix(prefix), t) for n, t in tensors.items() if n.startswith(prefix))
