"""A short supervised warm-up: the form of an answer, and about as much of its content as a weak teacher has."""

import torch
from torch import Tensor

from unified_models.progress import bar
from unified_models.rl.config import Config
from unified_models.rl.episodes import demonstrated
from unified_models.rl.tasks import Task
from unified_models.rl.trainer import Trainer


def warm_up(config: Config, task: Task, trainer: Trainer) -> list[float]:
    """config.warmup.steps steps of cross-entropy on what the model is to say, each on fresh demonstrations; the
    losses, in nats a token. The optimizer is left as it is: `trainer.restart` before what follows."""
    warmup, kept = config.warmup, []
    trainer.restart(warmup.lr)
    with bar("warming up", warmup.steps) as shown:
        for step in range(warmup.steps):
            batch = [
                demonstrated(task.demonstration(config.seed, step, i, warmup.right))
                for i in range(warmup.batch)
            ]
            masks = [torch.tensor(said[1:]) for _, said in batch]
            count = sum(int(mask.sum()) for mask in masks)

            def loss(
                lps: list[Tensor], places: range, masks: list[Tensor] = masks, count: int = count
            ) -> Tensor:
                said = [lp[masks[i]] for i, lp in zip(places, lps, strict=True)]
                return -torch.cat(said).sum() / count

            kept.append(trainer.step([ids for ids, _ in batch], 1.0, loss).loss)
            shown.advance(1)
    return kept
