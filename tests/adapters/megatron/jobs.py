"""What the processes of the tests run: every layout of two processes in turn, since an import of Megatron is slow."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import unified_models as um
from tests.adapters.megatron import shim
from tests.context.test_parallel import sequences

LENGTHS = ((140, 1, 9), (33, 0, 2, 70), (5, 40), (17, 131))
RATES = {"lr": 0.1, "adam_eps": 10.0, "weight_decay": 0.0}
"""Where eps is far above gradients AdamW's step is about lr / eps times the gradient: it does not turn the last bits of
a gradient near 0 into its sign, as it does with 1e-8. Megatron's optimizer takes no SGD."""
STEPS, TEMPERATURE = 3, 0.9
REPLICATED = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
}


class Layout(NamedTuple):
    """Sizes of Megatron's groups over two processes; what is left is data parallel."""

    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1


PLAIN = ("dp2", "ep2", "pp2", "cp2")
CROSSINGS = (("ep2", "ep2"), ("ep2", "dp2"), ("dp2", "ep2"), ("pp2", "dp2"), ("ep2", "pp2"))
"""A layout that wrote a checkpoint, and one that reads it."""
LAYOUTS = {
    "dp2": Layout(),
    "ep2": Layout(ep=2),
    "pp2": Layout(pp=2),
    "vpp2": Layout(pp=2, vpp=2),
    "cp2": Layout(cp=2),
    "cp2 ep2": Layout(cp=2, ep=2),
}


def packs() -> list[list[list[int]]]:
    """The microbatches of one step."""
    return [sequences(lengths, seed=7 + i) for i, lengths in enumerate(LENGTHS)]


def weighted(lps: Sequence[Tensor], batch: Any) -> tuple[Tensor, int, list[Tensor]]:
    """A sum in which each token has a weight of its own, how many they are, and the logprobs again."""
    total = sum((lp * torch.linspace(1, -2, len(lp) + 1)[:-1]).sum() for lp in lps)
    assert isinstance(total, Tensor)
    return total, sum(map(len, lps)), [lp.detach().clone() for lp in lps]


@contextmanager
def groups(layout: Layout) -> Iterator[None]:
    """Megatron's process groups, for as long as this lasts."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
    )
    yield
    parallel_state.destroy_model_parallel()


class Trainer:
    """A model under Megatron in the groups that there are."""

    def __init__(self, folder: Path, numerics: str = "deployed", recompute: bool = False) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig

        from unified_models.adapters.megatron import layout, train

        self.train = train
        model = um.load(folder, experts=layout.held(), numerics=numerics, progress=False)
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=True, grad_reduce_in_fp32=True
        )
        self.stages = layout.wrap(model, ddp, recompute=recompute)
        settings = OptimizerConfig(
            bf16=numerics == "deployed", use_distributed_optimizer=True, clip_grad=0.0, **RATES
        )
        self.optimizer = layout.optimizer(self.stages, settings)
        here, size = (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )
        mine = packs()[here::size]
        self.numbers = list(range(len(LENGTHS)))[here::size]
        self.batches = [train.Microbatch(pack, TEMPERATURE) for pack in mine]

    def logprobs(self) -> dict[int, list[Any]]:
        """By number of the microbatch, where the last stage is here."""
        return self.numbered(self.train.logprobs(self.stages, self.batches))

    def step(self) -> dict[int, list[Any]]:
        """One step; by number of the microbatch, the logprobs it trained on, where the last stage is here."""
        told, _ = self.train.step(self.stages, self.optimizer, self.batches, weighted)
        return self.numbered(told)

    def numbered(self, found: list[list[Tensor]]) -> dict[int, list[Any]]:
        """As arrays: Megatron makes torch's storages such that only processes with Megatron unpickle them."""
        return {n: [lp.numpy() for lp in lps] for n, lps in zip(self.numbers, found, strict=False)}

    def states(self, loading: bool = False) -> dict[str, Any]:
        """For dist_checkpointing."""
        parts = {
            f"model{i}": stage.module.sharded_state_dict() for i, stage in enumerate(self.stages)
        }
        optimizer = self.optimizer.sharded_state_dict(
            parts, is_loading=loading, metadata=dict(REPLICATED)
        )
        return parts | {"optimizer": optimizer}

    def mains(self) -> dict[str, Tensor]:
        """Main parameters and the optimizer's states of this process's stages and experts, whole and float32."""
        from megatron.core.dist_checkpointing import ShardedTensor
        from megatron.core.dist_checkpointing.dict_utils import nested_values

        found = nested_values(self.states()["optimizer"])
        return {t.key: t.data.clone() for t in found if isinstance(t, ShardedTensor)}

    def save(self, folder: Path) -> None:
        """With Megatron's dist_checkpointing."""
        import torch.distributed as dist
        from megatron.core import dist_checkpointing

        if dist.get_rank() == 0:
            folder.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(self.states(), str(folder))

    def load(self, folder: Path) -> None:
        """What `save` wrote, in this or in another layout."""
        from megatron.core import dist_checkpointing

        loaded = dist_checkpointing.load(self.states(loading=True), str(folder))
        for i, stage in enumerate(self.stages):
            stage.module.load_state_dict(loaded[f"model{i}"])
        self.optimizer.load_state_dict(loaded["optimizer"])


def written(mains: dict[str, Tensor], file: Path) -> Path:
    """A file with the main parameters alone, by path: they are many for a pipe between processes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    prefix = "optimizer.state.param."
    kept = {key.removeprefix(prefix): t for key, t in mains.items() if key.startswith(prefix)}
    torch.save(kept, file)
    return file


def digests(mains: dict[str, Tensor], first: int) -> dict[str, tuple[int, str]]:
    """(bytes, hash) of each state; of stacks of experts, of each expert by its number, `first` for the first here."""
    out = {}
    for key, value in mains.items():
        parts = {f"{key} {first + i}": each for i, each in enumerate(value)}
        for name, part in (parts if ".experts." in key else {key: value}).items():
            raw = part.contiguous().numpy().tobytes()
            out[name] = (len(raw), sha256(raw).hexdigest())
    return out


def state_of(trainer: Trainer, file: Path) -> dict[str, Any]:
    """Logprobs, main parameters and all states of a trainer, as they are now."""
    from megatron.core import parallel_state

    mains = trainer.mains()
    held = next((len(t) for key, t in mains.items() if ".experts." in key), 0)
    first = held * parallel_state.get_expert_model_parallel_rank()
    return {
        "after": trainer.logprobs(),
        "mains": written(mains, file),
        "states": digests(mains, first),
    }


def layouts_job(
    folder: Path, numerics: str, place: Path, names: Sequence[str], saving: bool
) -> dict[str, dict[str, Any]]:
    """By layout: logprobs before any step, and those that the first step trained on, with recomputation; after three
    steps, logprobs, main parameters and states. If saving: also of a trainer that resumed there, and the states of both
    after one step more."""
    import torch.distributed as dist

    def file(name: str) -> Path:
        return place / f"{name}.{dist.get_rank()}.pt"

    out = {}
    for name in names:
        with groups(LAYOUTS[name]):
            trainer = Trainer(folder, numerics)
            found: dict[str, Any] = {"first": trainer.logprobs()}
            for stage in trainer.stages:
                stage.module.recompute = True
            found["recomputed"] = trainer.step()
            for _ in range(STEPS - 1):
                trainer.step()
            found |= state_of(trainer, file(name))
            if saving:
                trainer.save(place / name)
                trainer.step()
                found["later"] = digests(trainer.mains(), 0)
                again = Trainer(folder, numerics)
                again.load(place / name)
                found["resumed"] = state_of(again, file("resumed"))
                again.step()
                found["resumed"]["later"] = digests(again.mains(), 0)
            out[name] = found
    for wrote, name in CROSSINGS if saving else ():
        if not {wrote, name} <= set(names):
            continue
        with groups(LAYOUTS[name]):
            other = Trainer(folder, numerics)
            other.load(place / wrote)
            out[f"{wrote} as {name}"] = state_of(other, file("crossed"))
    return out


def plain_steps(model: Any, steps: int, turn: int = 1, parallel: Any = None) -> dict[str, Tensor]:
    """Main parameters after steps of torch's AdamW without Megatron. turn: -1 adds gradients of packs in other order.
    parallel: of context parallelism, over all processes."""
    import torch.distributed as dist

    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"lr": RATES["lr"], "eps": RATES["adam_eps"], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(trained, **options)
    model.commit_after(optimizer)
    shared = {} if parallel is None else {"parallel": parallel}
    for _ in range(steps):
        optimizer.zero_grad()
        tokens = 0
        for pack in packs()[::turn]:
            total, count, _ = weighted(um.logprobs(model, pack, TEMPERATURE, **shared), None)
            total.backward()
            tokens += count
        for p in trained:
            assert p.grad is not None
            if parallel is not None:
                dist.all_reduce(p.grad)
            p.grad /= tokens
        optimizer.step()
    return {path: w.master.detach() for path, w in model.weights() if not w.frozen}


def everything_job(folder: Path, names: Sequence[str]) -> dict[str, Any]:
    """All that one model is asked for: its layouts as deployed, with checkpoints, and unquantised; refusals."""
    shim.install()
    place, plain = folder.parent, [name for name in names if name in PLAIN]
    return {
        "deployed": layouts_job(folder, "deployed", place / "deployed", names, True),
        "float32": layouts_job(folder, "float32", place / "float32", plain, False),
        "plain": {"cp2": {"mains": plain_cp(folder, place)}},
        "refusals": refusals(folder),
    }


def plain_cp(folder: Path, place: Path) -> Path:
    """Three steps under context parallelism without Megatron: a file of main parameters."""
    import torch.distributed as dist

    from unified_models.context.parallel import Parallel

    model = um.load(folder, progress=False)
    mains = plain_steps(model, STEPS, parallel=Parallel(tokens=dist.group.WORLD))
    file = place / f"plain.{dist.get_rank()}.pt"
    torch.save(mains, file)
    return file


def refusals(folder: Path) -> dict[str, str]:
    """What is refused, and in which words."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallelConfig

    from unified_models.adapters.megatron import layout, train

    right: dict[str, Any] = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True}

    def wrapped(load: dict[str, Any], ddp: Any = None, **more: Any) -> Any:
        model = um.load(folder, progress=False, **load)
        return layout.wrap(model, DistributedDataParallelConfig(**(right | (ddp or {}))), **more)

    def empty() -> None:
        train.logprobs(wrapped({}), [train.Microbatch([[], []])])

    cases = {
        "gradients": lambda: wrapped({}, {"grad_reduce_in_fp32": False}),
        "gathering": lambda: wrapped(
            {}, {"overlap_param_gather": True, "overlap_grad_reduce": True}
        ),
        "loss": lambda: wrapped({}, config=partial(layout.config, calculate_per_token_loss=False)),
        "experts": lambda: wrapped({"experts": (1, 2)}),
        "packed": lambda: wrapped({"weights": "packed"}),
        "sizes": lambda: wrapped({}, sizes=[1, 1]),
        "empty": empty,
    }
    with groups(Layout()):
        out = {name: refusal(case) for name, case in cases.items()}
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    out["tensors"] = refusal(lambda: wrapped({}))
    parallel_state.destroy_model_parallel()
    return out


def refusal(case: Callable[[], Any]) -> str:
    """The words of a ValueError; "" where there was none."""
    try:
        case()
    except ValueError as error:
        return str(error)
    return ""
