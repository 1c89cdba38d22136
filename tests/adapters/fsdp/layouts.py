"""Models, sequences and layouts of these tests: a cut model in each of several processes."""

from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import unified_models as um
from unified_models.adapters import fsdp
from unified_models.context.parallel import Parallel
from unified_models.model import LanguageModel

TINY = Path(__file__).parents[3] / "configs/tiny"
MODELS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        "num_hidden_layers": 3,
        "compress_ratios": [0, 4, 8],
        "num_hash_layers": 1,
        "hidden_size": 128,
        "moe_intermediate_size": 64,
        "index_n_heads": 4,
        "num_attention_heads": 2,
        "hc_sinkhorn_iters": 4,
    },
    "nemotron_h": {"config": TINY / "nemotron_h_mixed.json"},
}
LENGTHS = (130, 1, 33, 17, 2, 40)
TOKENS = sum(LENGTHS) - len(LENGTHS)


class Layout(NamedTuple):
    """How many processes share the experts, and how many a pack; masters are cut over all."""

    ep: int = 1
    cp: int = 1


LAYOUTS = {
    2: {"FSDP 2": Layout(), "EP 2": Layout(ep=2), "CP 2": Layout(cp=2)},
    4: {
        "FSDP 4": Layout(),
        "EP 4": Layout(ep=4),
        "CP 4": Layout(cp=4),
        "EP 2 x edp 2": Layout(ep=2),
        "CP 2 x dp 2": Layout(cp=2),
    },
}


def sequences() -> list[list[int]]:
    """One pack of LENGTHS."""
    random = Random(0)
    return [[random.randrange(512) for _ in range(n)] for n in LENGTHS]


def share(layout: Layout, rank: int, size: int) -> slice:
    """The sequences of a process."""
    return slice(rank // layout.cp, None, size // layout.cp)


class Cut(NamedTuple):
    """A cut model, its groups, and this process's sequences."""

    model: LanguageModel
    parallel: Parallel
    mine: list[list[int]]


def wrapped(
    folder: Path, layout: Layout, numerics: str = "deployed", device: str = "cpu", **options: Any
) -> Cut:
    """The model of a folder, cut in this process; options: of `fsdp.wrap`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    inner = layout.ep * layout.cp
    assert 1 in (layout.ep, layout.cp) and size % inner == 0
    both = init_device_mesh(device, (size // inner, inner), mesh_dim_names=("outer", "inner"))
    group = both["inner"].get_group()
    spread = (rank % layout.ep, layout.ep)
    model = um.load(folder, device=device, numerics=numerics, progress=False, experts=spread)
    if layout.ep > 1:
        options["experts_mesh"] = both["outer"]
    fsdp.wrap(model, init_device_mesh(device, (size,)), **options)
    parallel = Parallel(
        experts=group if layout.ep > 1 else None, tokens=group if layout.cp > 1 else None
    )
    return Cut(model, parallel, sequences()[share(layout, rank, size)])


def trained(
    model: LanguageModel, mine: list[list[int]], steps: int, tokens: int = TOKENS, **how: Any
) -> torch.optim.Optimizer:
    """SGD, so that a difference in a gradient stays one of its size; how: of `um.logprobs`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model.commit_after(optimizer)
    for _ in range(steps):
        (-torch.cat(um.logprobs(model, mine, **how)).sum() / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def masters(cut: Cut) -> dict[str, Tensor]:
    """Every tensor of the checkpoint, whole."""
    return {n: t.clone() for n, t in fsdp.named_tensors(cut.model, cut.parallel)}


def detached(lps: list[Tensor]) -> list[Tensor]:
    """Without their graph."""
    return [lp.detach() for lp in lps]


def gradients(model: LanguageModel) -> dict[str, Tensor]:
    """What this process holds of each gradient, all of which are there; then none."""
    found = {}
    for path, weight in model.weights():
        owned: Any = weight.owned
        if owned.requires_grad:
            assert owned.grad is not None, f"{path} has no gradient"
            grad = owned.grad
            found[path] = (grad.to_local() if hasattr(grad, "to_local") else grad).clone()
            owned.grad = None
    return found
