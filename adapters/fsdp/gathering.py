"""Whole tensors of a cut model, one at a time, on every process: what a rollout engine is given, and an export writes.

Every function here is collective: all processes call it, in the same order.
"""

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from unified_models.checkpoint.names import Names, Part
from unified_models.context.parallel import Parallel
from unified_models.model import LanguageModel
from unified_models.weight import Table, Weight


def all_parts(model: LanguageModel) -> list[Part]:
    """Every tensor of the checkpoint, those of other processes' experts in their places; the same on every process."""
    names = Names.of(model)
    held: dict[tuple[str, bool], list[Part]] = {}
    for part in (*names.parts, *names.elsewhere):
        held.setdefault((part.path, part.of_input), []).append(part)
    for parts in held.values():
        parts.sort(key=lambda part: part.index or 0)
    return [part for parts in held.values() for part in parts]


@torch.no_grad()
def named_tensors(
    model: LanguageModel, parallel: Parallel | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, master or table) of everything the forward reads, as `um.named_tensors` of an uncut model.

    At most one tensor is whole at a time (of a stack of experts, one matrix), so memory is bounded by the largest.
    """
    for part in all_parts(model):
        yield part.name, values(part, parallel or Parallel())


@torch.no_grad()
def values(part: Part, parallel: Parallel) -> Tensor:
    """The whole master (or table) of one part; float32."""
    owner = part.owner
    if isinstance(owner, Table):
        return owner.data
    if part.index is None:
        return owner.whole()
    return matrix(owner, owner.first + part.index, parallel)


def matrix(weight: Weight, e: int, parallel: Parallel) -> Tensor:
    """Matrix e of a stack, from the process that holds it: first to the processes that hold the same experts, then
    within each group of processes that share them."""
    assert weight.owned is not None, f"{weight.label}: holds packed bytes only"
    group, held = parallel.experts, weight.shape[0]
    out = torch.empty(weight.shape[1:], dtype=torch.float32, device=weight.owned.device)
    source = 0 if group is None else e // held
    if group is None or dist.get_rank(group) == source:
        _own(weight.owned.detach(), e - weight.first, out)
    if group is not None:
        dist.broadcast(out, group=group, group_src=source)
    return out


def _own(master: Tensor, row: int, out: Tensor) -> None:
    if not isinstance(master, DTensor):
        out.copy_(master[row])
        return
    mesh, local = master.device_mesh, master.to_local()
    each = -(-master.shape[0] // mesh.size())  # rows of a process, as FSDP cuts them
    source = row // each
    if mesh.get_local_rank() == source:
        out.copy_(local[row - source * each])
    dist.broadcast(out, group=mesh.get_group(), group_src=source)
