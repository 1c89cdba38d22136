"""`wrap(model, mesh)`: masters cut over processes (FSDP2), and the packed bytes that every process computes with.

A block is made whole before its forward and cut again after it, in bfloat16: a master reaches the kernels through
pack(bf16(master)) alone, so nothing is lost. Weights of another dtype than their block's are made whole on their own.
The optimizer owns the cut float32 masters; gradients are float32 and summed over processes.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from unified_models.model import LanguageModel
from unified_models.sharding import PACKED
from unified_models.weight import Weight


@dataclass(frozen=True)
class Shards:
    """Of one weight: the cut master that the optimizer owns, whether packed bytes stay, and the module with which it is
    made whole (`sharding.Sharding`)."""

    owned: Tensor
    resident: bool
    module: FSDPModule

    @property
    def group(self) -> Any:
        """The processes that the master is cut over."""
        owned: Any = self.owned
        return owned.device_mesh.get_group()

    def meet(self, master: Tensor | None) -> None:
        """The whole master is a tensor of FSDP's own, made at its first use: its gradient shall be float32."""
        if master is not None and master.requires_grad and not isinstance(master, DTensor):
            master.grad_dtype = torch.float32

    def renew(self) -> None:
        """A forward without a backward leaves masters whole: those of before the change."""
        self.module.reshard()


def wrap(
    model: LanguageModel,
    mesh: DeviceMesh,
    *,
    packed: str = "resident",
    experts_mesh: DeviceMesh | None = None,
) -> LanguageModel:
    """Cut the masters of a committed model over the processes of a mesh of one axis, in place; the model.

    Before the optimizer is made, which then takes `model.parameters()` and `model.commit_after(optimizer)`.

    Args:
        packed: "resident" keeps every weight's packed bytes on every process; a commit gathers the masters. "rebuild"
            derives them within each forward, from the masters that were made whole for it, and lets them go. The same
            bytes either way.
        experts_mesh: processes that hold the same experts, where a `Parallel` spreads them; None: all processes hold
            all of them. Mesh of one process: theirs are not cut.

    Gradients are summed over the mesh, not averaged: divide the loss by the number of tokens that all processes train.
    Raises ValueError for a model without masters, one that was wrapped before, meshes that do not hold each expert as
    often as its process holds experts, or another value of packed.
    """
    check(model, mesh, packed, experts_mesh)
    current = {weight for _, weight in model.weights() if weight.committed == weight.version}
    spread = {weight for _, weight in model.weights() if weight.part_of_stack}
    left = {w.master for _, w in model.weights() if w.frozen and w.exact}
    if experts_mesh is None or experts_mesh.size() == 1:
        left |= {weight.master for weight in spread}
    for block in model.blocks:
        _shard(block, mesh, experts_mesh, spread, left)
    # The root stays whole from its forward to the end of the backward, so that logits can be asked for chunk by chunk:
    # processes have different numbers of chunks, and must not wait for each other within one.
    _shard(model, mesh, experts_mesh, spread, left, reshard=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    modules = made_whole_with(model)
    for _, weight in model.weights():
        owned: Any = weight.master
        if isinstance(owned, DTensor):
            weight.sharding = Shards(owned, packed == "resident", modules[weight])
            if packed == "rebuild":
                weight.let_go()
        if weight in current:
            weight.committed = weight.version
    return model


def check(
    model: LanguageModel, mesh: DeviceMesh, packed: str, experts_mesh: DeviceMesh | None
) -> None:
    """Refuse before anything changes."""
    if packed not in PACKED:
        raise ValueError(f"packed must be one of {', '.join(PACKED)}, got {packed!r}")
    if mesh.ndim != 1:
        raise ValueError(f"the mesh must have one axis, got {mesh}")
    for path, weight in model.weights():
        if weight.master is None:
            raise ValueError(f"{path} holds packed bytes only: load with weights='master' to train")
        if isinstance(weight.master, DTensor):
            raise ValueError(f"{path} is cut already: a model is wrapped once")
        held, alike = len(weight.master) if weight.shape else 1, 1
        if experts_mesh is not None:
            alike = experts_mesh.size()
        if weight.part_of_stack and mesh.size() * held != weight.stack * alike:
            raise ValueError(
                f"{path} holds experts {weight.first} to {weight.first + held - 1} of {weight.stack}, which does not "
                f"fit a mesh of {mesh.size()} of which {alike} hold the same experts (experts_mesh)"
            )


def _shard(
    module: nn.Module,
    mesh: DeviceMesh,
    experts_mesh: DeviceMesh | None,
    spread: set[Weight],
    left: set[Any],
    reshard: bool = True,
) -> None:
    """Cut what lies in `module` and is not cut yet: leaves that differ from the rest first, then the rest as one."""
    mine = [w for w in _weights(module) if w.master not in left]
    widest = all(dtype_of(w) == torch.float32 for w in mine if w not in spread)
    group = torch.float32 if widest else torch.bfloat16
    for weight in mine:
        if weight in spread or dtype_of(weight) != group:
            where = experts_mesh if weight in spread and experts_mesh is not None else mesh
            # Cut again only after the backward: its own forward returns what lies in that memory.
            fully_shard(
                weight, mesh=where, mp_policy=policy(dtype_of(weight)), reshard_after_forward=False
            )
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=policy(group),
        ignored_params=left,
        reshard_after_forward=reshard,
    )


def made_whole_with(model: LanguageModel) -> dict[Weight, FSDPModule]:
    """The innermost FSDP module of each weight."""
    found: dict[Weight, FSDPModule] = {}
    for module in model.modules():  # from the outside in
        if isinstance(module, FSDPModule):
            within = (child for child in module.modules() if isinstance(child, Weight))
            found |= dict.fromkeys(within, module)
    return found


def _weights(module: nn.Module) -> Iterator[Weight]:
    """Weights that are not cut yet."""
    for child in module.modules():
        if isinstance(child, Weight) and not isinstance(child.master, DTensor):
            yield child


def dtype_of(weight: Weight) -> torch.dtype:
    """In which a master is made whole: packing rounds it to bfloat16 first, or not at all."""
    return torch.float32 if weight.format.name == "float32" else torch.bfloat16


def policy(dtype: torch.dtype) -> MixedPrecisionPolicy:
    """Parameters whole in `dtype`, gradients added in float32, activations never cast."""
    return MixedPrecisionPolicy(
        param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
