"""megatron-core 0.19.2 on a machine without CUDA, for tests alone: `install()`.

Megatron names the device in some 40 places: "cuda" means the CPU here, dtypes are called by their CUDA names, streams
and barriers of a device do nothing, and gloo runs collectives one by one. Without Transformer Engine its optimizer is
torch's AdamW, whose states 0.19.2 does not restore: `mend()` does.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

TYPES = {
    torch.float32: "FloatTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.float16: "HalfTensor",
}


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs = kwargs | {"device": "cpu"}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{TYPES.get(args[0].dtype, 'Tensor')}"
        return func(*args, **kwargs)


class Waits:
    """The handle of collectives that are done."""

    def wait(self) -> None:
        """Nothing is left to wait for."""


@contextmanager
def one_by_one(*_: Any, **__: Any) -> Iterator[Waits]:
    """gloo cannot coalesce."""
    yield Waits()


def install() -> None:
    """Make this process believe in a device. Undone by its end alone."""
    warnings.simplefilter("ignore")
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer._coalescing_manager = one_by_one
    mend()
    OnCpu().__enter__()
    cuda: Any = torch.cuda
    cuda.current_device = lambda: "cpu"
    cuda.synchronize = cuda.empty_cache = cuda.set_device = lambda *_, **__: None
    cuda.current_stream = lambda *_: None
    cuda.get_rng_state = torch.get_rng_state
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None


def mend() -> None:
    """The three defects of AdamW's fallback in DistributedOptimizer: no step before the first one, no "step" among
    loaded tensors, one tensor of steps for all parameters."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    told, loaded, put = (
        DistributedOptimizer.state_dict,
        DistributedOptimizer.load_state_dict,
        DistributedOptimizer._set_main_param_and_optimizer_states,
    )

    steps: list[float] = []

    def state_dict(self: Any) -> Any:
        inner = self.optimizer
        if not inner.state:
            for group in inner.param_groups:
                for p in group["params"]:
                    zeros = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
                    inner.state[p] = {"step": torch.tensor(0.0), **zeros}
        if inner.state:
            state = told(self)
            steps[:] = [state["optimizer"]["param_groups"][0]["step"]]
            return state
        # A stage without experts: the optimizer of all else comes first, and knows the step.
        groups = inner.state_dict()["param_groups"]
        kept = [{k: v for k, v in g.items() if k != "params"} | {"step": steps[0]} for g in groups]
        return {"optimizer": {"param_groups": kept}}

    def load_state_dict(self: Any, state: Any) -> None:
        loaded(self, state)
        for each in self.optimizer.state.values():
            each["step"] = each["step"].clone()

    def put_states(self: Any, param: Any, tensors: Any) -> None:
        group, place = self.model_param_group_index_map[param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][place]]
        put(self, param, tensors | {"step": state["step"]})

    DistributedOptimizer.state_dict = state_dict
    DistributedOptimizer.load_state_dict = load_state_dict
    DistributedOptimizer._set_main_param_and_optimizer_states = put_states
