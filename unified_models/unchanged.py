"""The check at the start of a backward: the masters are those of its forward, on every process that takes part."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unified_models.autograd import apply
from unified_models.context.collectives import Group
from unified_models.model import LanguageModel
from unified_models.weight import Version, Weight


class _Unchanged(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, versions: dict[Weight, Version], groups: Sequence[Group]
    ) -> Tensor:
        ctx.versions, ctx.groups = versions, groups
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        refuse(ctx.versions, ctx.groups, grads[0].device)
        return grads[0], None, None


def unchanged(x: Tensor, model: LanguageModel, groups: Sequence[Group]) -> Tensor:
    """x, a result of the model: its backward is refused with a RuntimeError, before anything of it has run, where a
    weight changed since now on any process of the groups.

    A weight's own backward looks, too, but amid a pass: by then other processes may wait for this one. groups: those
    that share masters, experts or the pack, in the same order on every process.
    """
    if not x.requires_grad:
        return x
    versions = {weight: weight.version for _, weight in model.weights()}
    cut = (weight.sharding.group for weight in versions if weight.sharding is not None)
    all_ = [group for group in dict.fromkeys((*groups, *cut)) if group is not None]
    return apply(_Unchanged, x, versions, all_)


def refuse(versions: dict[Weight, Version], groups: Sequence[Group], device: torch.device) -> None:
    """RuntimeError on every process of the groups, where a weight of any has another version than these."""
    changed = [weight for weight, version in versions.items() if weight.version != version]
    told = torch.tensor([len(changed)], device=device)
    for group in groups:
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    if not int(told):
        return
    if not changed:
        raise RuntimeError("a master changed between forward and backward on another process")
    first, more = changed[0], f"; so did {len(changed) - 1} more" if changed[1:] else ""
    raise RuntimeError(
        f"{first.label}: the master changed between forward and backward "
        f"(version {versions[first]} then, {first.version} now){more}"
    )
