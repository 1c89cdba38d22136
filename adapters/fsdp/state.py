"""Saving and resuming a cut model with its optimizer, by torch.distributed.checkpoint: any number of processes may read
what any other number wrote, and experts may be spread otherwise.

A stack of experts is saved as one entry for each, under its global number.
"""

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save as dcp_async_save
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor

from unified_models.model import LanguageModel
from unified_models.weight import Weight

Optimizer = torch.optim.Optimizer


def save(folder: str | Path, model: LanguageModel, optimizer: Optimizer, extra: Any = None) -> None:
    """Masters, the optimizer's state, each process's random state, and `extra` (what JSON can say: step,
    weight version, ...). Collective."""
    dcp_save(state(model, optimizer) | _others(extra), checkpoint_id=str(folder))


def save_async(
    folder: str | Path,
    model: LanguageModel,
    optimizer: Optimizer,
    extra: Any = None,
    *,
    group: Any,
) -> "Future[Any]":
    """`save` that returns once everything was copied; wait for the result before the next one.

    group: a gloo group of all processes of its own (`dist.new_group(backend="gloo")`): on the training's group its
    messages would meet those of the next step.
    """
    copies = state(model, optimizer) | _others(extra)
    future: Any = dcp_async_save(copies, checkpoint_id=str(folder), process_group=group)
    return future  # type: ignore[no-any-return]


def load(folder: str | Path, model: LanguageModel, optimizer: Optimizer) -> Any:
    """Everything that `save` wrote, in place, and committed; what was given as `extra`.

    Collective. torch's CheckpointException names what is missing. The random state is that of this process's rank,
    where as many processes had saved.
    """
    _fill(optimizer)
    target = state(model, optimizer)
    reader = FileSystemReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    mine = f"random.{dist.get_rank()}"
    random = {mine: torch.get_rng_state()} if mine in known else {}
    loaded: dict[str, Any] = target | {"extra": "null"} | random
    dcp_load(loaded, storage_reader=reader)
    for group, saved in zip(optimizer.param_groups, json.loads(loaded["groups"]), strict=True):
        for name, setting in saved.items():
            group[name] = tuple(setting) if isinstance(setting, list) else setting
    if random:
        torch.set_rng_state(loaded[mine])
    for _, weight in model.weights():
        weight.bumps += 1
    model.commit()
    return json.loads(loaded["extra"])


def state(model: LanguageModel, optimizer: Optimizer) -> dict[str, Any]:
    """Entry name -> the tensor itself, or a view of it: loading into them is loading."""
    found: dict[str, Any] = {}
    owned: dict[Tensor, tuple[str, Weight]] = {}
    for path, weight in model.weights():
        if weight.owned is not None:
            owned[weight.owned] = path, weight
            found |= dict(_entries(f"master.{path}", weight, weight.owned.detach()))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            path, weight = owned[parameter]
            for name, value in optimizer.state.get(parameter, {}).items():
                label = f"optimizer.{path}.{name}"
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    found |= dict(_entries(label, weight, value))
                else:
                    found[label] = value
    groups = [{k: plain(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    return found | {"groups": json.dumps(groups)}


def plain(setting: Any) -> Any:
    """Of a parameter group: a number for a tensor of one."""
    return setting.item() if isinstance(setting, Tensor) else setting


def _others(extra: Any) -> dict[str, Any]:
    return {"extra": json.dumps(extra), f"random.{dist.get_rank()}": torch.get_rng_state()}


def _entries(name: str, weight: Weight, value: Tensor) -> Iterator[tuple[str, Tensor]]:
    if weight.axes[:1] != ("experts",):
        yield name, value
        return
    first, rows = weight.first, value
    if isinstance(value, DTensor):
        each = -(-value.shape[0] // value.device_mesh.size())
        first, rows = first + each * value.device_mesh.get_local_rank(), value.to_local()
    for i, row in enumerate(rows):
        yield f"{name}.{first + i}", row


def _fill(optimizer: Optimizer) -> None:
    """Give a fresh optimizer its state, to load into: one step of nothing."""
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(r) if isinstance(r := group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
