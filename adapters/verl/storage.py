"""A checkpoint of the engine: masters, tables, the optimizer's state, its schedule and every random state.

A folder that all processes share: torch's distributed checkpoint, which another number of processes can read, and
one JSON file for each process with the rest.
"""

import json
import random
import shutil
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from unified_models.checkpoint import save as save_model
from unified_models.checkpoint.shards import some
from unified_models.model import LanguageModel


@dataclass
class Training:
    """What goes on after a load: a model, its optimizer and its schedule."""

    model: LanguageModel
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler

    def read(self) -> dict[str, Tensor]:
        """What the forward reads: `model/PATH` is a master as it lies here, whole or cut, or a table."""
        owned = ((path, weight.owned) for path, weight in self.model.weights())
        masters = {f"model/{path}": t.detach() for path, t in owned if t is not None}
        return masters | {f"model/{path}": table.data for path, table in self.model.tables()}

    def trained(self) -> Iterator[tuple[str, Tensor]]:
        """(path, master) of what the optimizer changes."""
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        for path, weight in self.model.weights():
            if weight.owned is not None and id(weight.owned) in held:
                yield path, weight.owned

    def moments(self) -> dict[str, Tensor]:
        """`optimizer/PATH/FIELD`: the optimizer's tensors for each master; nothing before its first step."""
        return {
            f"optimizer/{path}/{field}": value
            for path, master in self.trained()
            for field, value in self.optimizer.state.get(master, {}).items()
        }

    def told(self) -> dict[str, Any]:
        """The schedule's place, the learning rates, and this process's random states, as JSON."""
        return {
            "scheduler": self.scheduler.state_dict(),
            "lr": [float(group["lr"]) for group in self.optimizer.param_groups],
            "random": random_states(),
        }


def save(training: Training, folder: Path, contents: Collection[str]) -> None:
    """Write a checkpoint beside `folder`, and rename it when all of it is there; one that was there goes then.

    contents: some of "model", "optimizer", "extra" (schedule and random states), "hf_model" (masters by official
    names, a folder that `um.load` reads; one process only).
    """
    partial = folder.parent / f".{folder.name}.partial"
    if rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    barrier()
    tensors = training.read() if "model" in contents else {}
    tensors |= training.moments() if "optimizer" in contents else {}
    state_dict_saver.save(
        tensors, checkpoint_id=partial / "tensors", no_dist=not dist.is_initialized()
    )
    if "extra" in contents:
        (partial / f"extra-{rank()}-of-{size()}.json").write_text(json.dumps(training.told()))
    if "hf_model" in contents:
        save_model(training.model, partial / "hf_model", masters=True)
    barrier()
    if rank() == 0:
        (partial / "contents.json").write_text(json.dumps(sorted(contents)))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    barrier()


def load(training: Training, folder: Path, contents: Collection[str]) -> None:
    """Go on from a checkpoint: every master, table, moment, learning rate and random state has its bits again.

    ValueError before anything changes: no checkpoint, one without some of `contents` or of another model, or random
    states of another number of processes.
    """
    tensors, told = folder / "tensors", folder / "contents.json"
    if not told.exists():
        raise ValueError(f"{folder}: no complete checkpoint ({told} is missing)")
    missing = set(contents) - {"hf_model", *json.loads(told.read_text())}
    if missing:
        raise ValueError(f"{folder}: saved without {sorted(missing)}, which load_contents asks for")
    held = FileSystemReader(tensors).read_metadata().state_dict_metadata
    wanted = training.read() if "model" in contents else {}
    moments = empty_moments(training, held, folder) if "optimizer" in contents else {}
    require_fit(wanted, held, "model/", folder)
    extra = read_extra(folder) if "extra" in contents else None
    state_dict_loader.load(
        wanted | moments, checkpoint_id=tensors, no_dist=not dist.is_initialized()
    )  # in place: into the masters' own memory
    for _, weight in training.model.weights():
        if weight.owned is not None:
            weight.commit()
    if "optimizer" in contents:
        training.optimizer.state.clear()
        for path, master in training.trained():
            prefix = f"optimizer/{path}/"
            for name in (n for n in moments if n.startswith(prefix)):
                training.optimizer.state[master][name.removeprefix(prefix)] = moments[name]
    if extra is not None:
        training.scheduler.load_state_dict(extra["scheduler"])
        for group, lr in zip(training.optimizer.param_groups, extra["lr"], strict=True):
            group["lr"] = lr
        set_random_states(extra["random"])
    barrier()


def empty_moments(training: Training, held: dict[str, Any], folder: Path) -> dict[str, Tensor]:
    """Memory for the optimizer's tensors that a checkpoint holds: cut as their master is, or whole."""
    masters = dict(training.trained())
    names = [name for name in held if name.startswith("optimizer/")]
    strangers = [n for n in names if n.split("/")[1] not in masters]
    if strangers:
        raise ValueError(f"{folder}: this model trains nothing called {some(strangers)}")
    made = {}
    for name in names:
        master, stored = masters[name.split("/")[1]], held[name]
        assert isinstance(stored, TensorStorageMetadata)
        dtype = stored.properties.dtype
        if stored.size == master.shape:
            made[name] = torch.zeros_like(master, dtype=dtype, requires_grad=False)
        else:
            made[name] = torch.zeros(stored.size, dtype=dtype)
    return made


def require_fit(wanted: dict[str, Tensor], held: dict[str, Any], prefix: str, folder: Path) -> None:
    """ValueError: the checkpoint holds other tensors than the model, or other shapes."""
    there = {name for name in held if name.startswith(prefix)}
    problems = []
    for text, names in (("missing", wanted.keys() - there), ("unknown", there - wanted.keys())):
        if names and wanted:
            problems.append(f"{text} ({len(names)}): {some(sorted(names))}")
    for name in sorted(wanted.keys() & there):
        if held[name].size != wanted[name].shape:
            problems.append(
                f"{name} is {tuple(held[name].size)}, expected {tuple(wanted[name].shape)}"
            )
    if problems:
        raise ValueError(f"{folder}: of another model\n  " + "\n  ".join(problems))


def read_extra(folder: Path) -> dict[str, Any]:
    """This process's JSON file; ValueError where the checkpoint was saved by another number of processes."""
    file = folder / f"extra-{rank()}-of-{size()}.json"
    if not file.exists():
        found = sorted(path.name for path in folder.glob("extra-*"))
        raise ValueError(
            f"{file} is missing (there: {', '.join(found) or 'none'}): random states go on in as many processes as "
            "they were saved by; leave 'extra' out of checkpoint.load_contents to do without"
        )
    extra: dict[str, Any] = json.loads(file.read_text())
    return extra


def random_states() -> dict[str, Any]:
    """The states of torch's, NumPy's and Python's generators, and of the GPU at hand, as JSON."""
    name, keys, *rest = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "torch": torch.get_rng_state().tolist(),
        "numpy": [name, keys.tolist(), *rest],  # type: ignore[union-attr]
        "python": random.getstate(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state().tolist()
    return states


def set_random_states(states: dict[str, Any]) -> None:
    """What `random_states` gave."""
    torch.set_rng_state(torch.tensor(states["torch"], dtype=torch.uint8))
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(torch.tensor(states["cuda"], dtype=torch.uint8))


def rank() -> int:
    """Of this process; 0 where there is one only."""
    return dist.get_rank() if dist.is_initialized() else 0


def size() -> int:
    """How many processes there are."""
    return dist.get_world_size() if dist.is_initialized() else 1


def barrier() -> None:
    """Wait for all processes."""
    if dist.is_initialized():
        dist.barrier()
