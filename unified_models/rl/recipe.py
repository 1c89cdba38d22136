"""The loop: sync, sample, verify, compare, update; from the last checkpoint on if there is one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from unified_models.checkpoint import load, update
from unified_models.context.local import LocalContext
from unified_models.context.plain import PlainContext
from unified_models.model import LanguageModel
from unified_models.progress import bar
from unified_models.rl.config import Config
from unified_models.rl.episodes import roll_out
from unified_models.rl.rollout import EmbeddedRollout, Rollout
from unified_models.rl.storage import Storage
from unified_models.rl.tasks import TASKS
from unified_models.rl.tasks.tokenizer import SIZE
from unified_models.rl.trainer import LocalTrainer, Trainer
from unified_models.rl.updates import Updates
from unified_models.rl.warmup import warm_up
from unified_models.tiny import write_tiny

CONTEXTS: dict[str, Callable[..., Any]] = {"consistent": LocalContext, "baseline": PlainContext}
Record = dict[str, Any]


def run(
    config: Config,
    out: str | Path | None = None,
    *,
    rollout: Rollout | None = None,
    trainer: Trainer | None = None,
) -> Iterator[Record]:
    """Do what is left of a run, and yield the metrics of each step as they are written.

    out: the folder, default config.out. rollout, trainer: others than the embedded engine and the trainer in this
    process; both have the starting weights (`load_start`).

    Raises:
        ValueError: the folder holds a run of another config, or the model's vocabulary is too small for bytes.
        UnequalError: a sampled token's logprob has other bits in the training forward (check = "stop"), or nothing
            was compared (any check but "off").
    """
    torch.set_num_threads(config.threads)
    recipe = Recipe(config, Storage(out or config.out, config), rollout, trainer)
    recipe.begin()
    with bar("training", config.steps) as shown:
        shown.advance(recipe.steps)
        while recipe.steps < config.steps:
            record = recipe.step()
            recipe.storage.append(record)
            if recipe.steps % config.checkpoint_every == 0 or recipe.steps == config.steps:
                recipe.save()
            shown.advance(1)
            yield record


def start_folder(config: Config, folder: Path) -> Path:
    """Where the checkpoint is that training starts from; `load_start` makes it where it is a tiny one."""
    return Path(config.model.folder or folder / "start")


def load_start(config: Config, folder: Path, experts: tuple[int, int] = (0, 1)) -> LanguageModel:
    """The model that training starts from: a checkpoint, or a tiny random one made in `folder`/start. experts: of
    `load`. ValueError: its vocabulary is too small."""
    source = start_folder(config, folder)
    if config.model.architecture and not source.exists():
        write_tiny(config.model.architecture, source, config.model.overrides, seed=config.seed)
    model = load(source, numerics=config.model.numerics, experts=experts)
    if model.config.vocab_size < SIZE:
        raise ValueError(
            f"{source}: vocab_size = {model.config.vocab_size}; bytes and an end take {SIZE}"
        )
    return model


class Recipe:
    """One run in memory. steps: done so far; accepted: steps in a row without an unequal bit."""

    def __init__(
        self,
        config: Config,
        storage: Storage,
        rollout: Rollout | None = None,
        trainer: Trainer | None = None,
    ) -> None:
        self.config, self.storage, self.task = config, storage, TASKS[config.task]
        self.steps = self.accepted = 0
        context = CONTEXTS[config.mode]
        self.trainer: Trainer = trainer or LocalTrainer(
            load_start(config, storage.folder),
            micro_batch=config.train.micro_batch,
            max_grad_norm=config.train.max_grad_norm,
            context=context,
        )
        self.rollout: Rollout = rollout or EmbeddedRollout(
            load_start(config, storage.folder), config.rollout, context
        )
        self.reference: Trainer | None = None

    def begin(self) -> None:
        """Take the newest checkpoint; without one, warm up and make the first."""
        checkpoint, train = self.storage.newest(), self.config.train
        if checkpoint is None:
            self.storage.forget_after(-1)
            warm_up(self.config, self.task, self.trainer)
            self.trainer.restart(train.lr, train.weight_decay)
            if self.config.loss.kl_coef:
                self.storage.save_reference(dict(self.trainer.named_tensors()))
            self.save()
        else:
            self.trainer.restart(train.lr, train.weight_decay)
            told = self.storage.load(checkpoint, self.trainer)
            self.steps, self.accepted = told["step"], told["accepted"]
            self.storage.forget_after(self.steps)
        if self.config.loss.kl_coef:
            model = load_start(self.config, self.storage.folder)
            update(model, self.storage.load_reference().items())
            self.reference = LocalTrainer(
                model,
                micro_batch=self.config.train.micro_batch,
                context=CONTEXTS[self.config.mode],
            )

    def save(self) -> None:
        """A checkpoint of everything that the next step depends on. There is no generator: draws are functions of the
        seed, the step and the place."""
        self.storage.save(self.steps, self.trainer, {"accepted": self.accepted})

    def sync(self) -> None:
        """Give the engine the trainer's weights, under the trainer's version, unless it has them."""
        if self.trainer.version > self.rollout.version:
            self.rollout.update(self.trainer.named_tensors(), self.trainer.version)

    def step(self) -> Record:
        """One step; its metrics. See docs/rl.md for what each means."""
        config, began = self.config, perf_counter()
        self.sync()
        version, hits = self.rollout.version, self.rollout.prefix_hits
        episodes = roll_out(
            self.rollout,
            self.task,
            seed=config.seed,
            step=self.steps,
            prompts=config.rollout.prompts,
            group=config.rollout.group,
            temperature=config.rollout.temperature,
        )
        sampled = perf_counter()
        updates = Updates(config, self.trainer, self.reference, episodes, version)
        reuse = config.train.reuse_rollout_logprobs
        updates.take_old(reuse and self.accepted >= config.train.acceptance_steps)
        compared = perf_counter()
        updates.run()
        ended = perf_counter()
        self.steps += 1
        told = updates.told()
        self.accepted = self.accepted + 1 if told["unequal"] == 0 else 0
        tokens = sum(len(e.versions) for e in episodes)
        return {
            "step": self.steps,
            "version": version,
            **told,
            "prefix_hits": self.rollout.prefix_hits - hits,
            "tokens": tokens,
            "tokens_per_second": tokens / (ended - began),
            "seconds_rollout": sampled - began,
            "seconds_check": compared - sampled,
            "seconds_train": ended - compared,
        }
