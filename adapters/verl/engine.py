"""The engine: a model of the zoo behind verl's BaseEngine, registered as "unified"."""

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric
from verl.utils.torch_functional import (
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
)
from verl.workers.config import FSDPOptimizerConfig
from verl.workers.config.optimizer import build_optimizer
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.base import BaseEngineCtx
from verl.workers.engine.utils import (
    detach_tree,
    enable_full_determinism,
    postprocess_batch_func,
    prepare_micro_batches,
)

import unified_models as um
from unified_models.adapters.fsdp import wrap
from unified_models.adapters.verl import storage
from unified_models.adapters.verl.batch import outputs, refuse_batch
from unified_models.adapters.verl.check import BitCheck
from unified_models.adapters.verl.settings import refuse_settings
from unified_models.checkpoint.names import Names
from unified_models.model import LanguageModel
from unified_models.sharding import whole
from unified_models.weight import Table

log = logging.getLogger(__name__)
Loss = Callable[..., tuple[Tensor, dict[str, Any]]]


@EngineRegistry.register(model_type="language_model", backend=["unified"], device=["cpu", "cuda"])
class UnifiedEngine(BaseEngine):  # type: ignore[misc]
    """A model of the zoo: float32 masters, verl's optimizers over them, packed weights committed after each step.

    In several processes the masters are cut over all of them (FSDP2) and each process trains its own sequences. Every
    batch that an update follows is compared with the rollout first; see `BitCheck`.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        """verl's HFModelConfig, our UnifiedEngineConfig, verl's FSDPOptimizerConfig (None: inference only) and
        CheckpointConfig. ValueError naming a setting that would not be followed."""
        super().__init__()
        refuse_settings(model_config, engine_config, checkpoint_config, storage.size())
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config, self.checkpoint_config = optimizer_config, checkpoint_config
        self.mode: str | None = None
        self.device = torch.device("cpu")
        if torch.cuda.is_available():
            self.device = torch.device("cuda", torch.cuda.current_device())
        if engine_config.full_determinism:
            enable_full_determinism(seed=engine_config.seed)
        self.check = BitCheck("off" if engine_config.forward_only else engine_config.check)
        self.saved: list[Path] = []
        self.training: storage.Training | None = None

    def initialize(self) -> None:
        """Load the checkpoint folder of the model config; make optimizer and schedule, unless forward_only."""
        self.model: LanguageModel = um.load(
            self.model_config.local_path, device=self.device, progress=False
        )
        if storage.size() > 1:
            mesh = init_device_mesh(self.device.type, (storage.size(),))
            wrap(self.model, mesh, packed=self.engine_config.packed)
        if not self.engine_config.forward_only:
            config = self.optimizer_config
            if not isinstance(config, FSDPOptimizerConfig):
                raise ValueError(
                    f"optimizer config is a {type(config).__name__}, expected FSDPOptimizerConfig"
                )
            owned = (weight.owned for _, weight in self.model.weights())
            optimizer = build_optimizer(
                [t for t in owned if t is not None and t.requires_grad], config
            )
            self.model.commit_after(optimizer)
            self.training = storage.Training(self.model, optimizer, schedule(optimizer, config))
        self.check.sent()
        self.to("cpu", self.is_param_offload_enabled, self.is_optimizer_offload_enabled, False)

    @property
    def is_param_offload_enabled(self) -> bool:
        """Whether the model lies in host memory between calls."""
        return bool(self.engine_config.param_offload)

    @property
    def is_optimizer_offload_enabled(self) -> bool:
        """Whether the optimizer's state lies in host memory between calls."""
        return bool(self.engine_config.optimizer_offload)

    def train_mode(self, **kwargs: Any) -> "Mode":
        """A context in which the engine trains; its gradients are gone afterwards."""
        return Mode(self, "train", **kwargs)

    def eval_mode(self, **kwargs: Any) -> "Mode":
        """A context in which the engine infers."""
        return Mode(self, "eval", **kwargs)

    def trains(self) -> storage.Training:
        """The optimizer and what it changes. ValueError: the engine is forward_only."""
        if self.training is None:
            raise ValueError("engine.forward_only = True: this engine has no optimizer")
        return self.training

    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""
        if self.training is not None:
            self.training.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """One step after clipping to optimizer_config.clip_grad, as verl's engines do; the norm before clipping. A norm
        that is not finite is told and skips the step."""
        training = self.trains()
        masters = [master for _, master in training.trained()]
        clip = self.optimizer_config.clip_grad
        norm = float(whole(torch.nn.utils.clip_grad_norm_(masters, max_norm=clip)))
        if norm == norm and abs(norm) != float("inf"):
            training.optimizer.step()
            self.check.stepped()
        else:
            log.warning("the gradient's norm is %s: no step", norm)
            training.optimizer.zero_grad()
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; the learning rate from now on."""
        scheduler = self.trains().scheduler
        scheduler.step()
        return float(scheduler.get_last_lr()[0])

    def forward_backward_batch(
        self, data: TensorDict, loss_function: Loss | None, forward_only: bool = False
    ) -> dict[str, Any]:
        """Run a batch in the micro-batches that it asks for; unless forward_only, gradients are added up.

        Args:
            data: verl's batch: input_ids jagged [S, length], temperature, prompts, responses, loss_mask, and what the
                loss reads.
            loss_function: called with model_output, data and dp_group for each micro-batch; returns (loss, metrics).
                None: forward only.

        Returns {"model_output": {"log_probs": jagged float32 [S, length], "entropy" where asked for}, "loss": one
        number for each micro-batch, "metrics"}. model_output is empty after a backward, unless return_model_output is
        set. Raises UnequalError and ValueError, as `BitCheck.compare`, before anything could be stepped.
        """
        refuse_batch(data)
        group = self.get_data_parallel_group()
        tokens = data["loss_mask"].sum().to(self.device)
        if group is not None:
            dist.all_reduce(tokens, group=group)
        tu.assign_non_tensor(
            data, sp_size=1, batch_num_tokens=tokens.item(), dp_size=self.get_data_parallel_size()
        )
        micro_batches, places = prepare_micro_batches(
            data=data, dp_group=group, same_micro_num_in_dp=True
        )
        told = [self._micro_batch(micro, loss_function, forward_only) for micro in micro_batches]
        output: dict[str, Any] = postprocess_batch_func(told, places, data)
        result = self.check.compare(
            data.to(self.device),
            output["model_output"]["log_probs"],
            trains=not forward_only,
            group=group,
        )
        if result is not None and not forward_only:
            for name in ("compared", "unequal"):
                output["metrics"][f"bits/{name}"] = Metric("sum", getattr(result, name))
        if not forward_only and not tu.get_non_tensor_data(data, "return_model_output", False):
            output["model_output"] = {}
        return output

    def _micro_batch(
        self, batch: TensorDict, loss_function: Loss | None, forward_only: bool
    ) -> dict[str, Any]:
        batch = batch.to(self.device)
        settings = self.engine_config
        with torch.set_grad_enabled(not forward_only):
            told = outputs(
                self.model,
                batch,
                recompute=self.model_config.enable_gradient_checkpointing and not forward_only,
                rows=settings.rows,
                provider=settings.provider,
            )
            if loss_function is None:
                assert forward_only, "a backward needs a loss"
                return {"model_output": told, "loss": 1.0, "metrics": {}}
            group = self.get_data_parallel_group()
            loss, metrics = loss_function(model_output=told, data=batch, dp_group=group)
            if not forward_only:
                # verl's losses are times the number of processes, for engines that average; ours adds.
                (loss / self.get_data_parallel_size()).backward()
        return {
            "model_output": detach_tree(told),
            "loss": loss.detach().item(),
            "metrics": metrics,
        }

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """(checkpoint name, float32 master or table) of everything that a forward reads, as our vLLM class takes them,
        and no adapter. Each weight is gathered on its own; every process must go through all of them."""
        self.check.sent()
        return self._tensors(), None

    @torch.no_grad()
    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        held, values = None, torch.empty(0)
        for part in Names.of(self.model).parts:
            owner = part.owner
            if owner is not held:
                held = owner
                values = owner.data if isinstance(owner, Table) else owner.whole()
            yield part.name, values if part.index is None else values[part.index]

    def get_data_parallel_rank(self) -> int:
        """Of this process among those that train different sequences: all."""
        return storage.rank()

    def get_data_parallel_size(self) -> int:
        """How many processes train different sequences: all."""
        return storage.size()

    def get_data_parallel_group(self) -> Any:
        """All processes; None where torch.distributed was not started."""
        return dist.group.WORLD if dist.is_initialized() else None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Every process has outputs of its own."""
        return True

    def to(
        self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True
    ) -> None:
        """Move the model (with its gradients) and the optimizer's state to host memory ("cpu"), or back to this
        process's device."""
        super().to(device=device, model=model, optimizer=optimizer, grad=grad)
        target = torch.device("cpu") if device == "cpu" else self.device
        if model and self.device != torch.device("cpu"):
            self.model.to(target)
        if optimizer and self.training is not None:
            for master, state in self.training.optimizer.state.items():
                for field, value in state.items():
                    if value.shape == master.shape:
                        state[field] = value.to(target)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **_: Any,
    ) -> None:
        """Write the folder local_path, whole or not at all; of those that this engine wrote, keep the newest
        max_ckpt_to_keep (None: all). Every process must see the same folder. ValueError: an hdfs_path."""
        if hdfs_path is not None:
            raise ValueError(f"hdfs_path = {hdfs_path!r}: checkpoints go to local_path only")
        folder = Path(local_path).resolve()
        storage.save(self.trains(), folder, self.checkpoint_config.save_contents)
        self.saved = [path for path in self.saved if path != folder] + [folder]
        while max_ckpt_to_keep and len(self.saved) > max_ckpt_to_keep:
            old = self.saved.pop(0)
            if storage.rank() == 0:
                shutil.rmtree(old, ignore_errors=True)

    def load_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        del_local_after_load: bool = True,
        **_: Any,
    ) -> None:
        """Go on exactly from what `save_checkpoint` wrote. Nothing was fetched from elsewhere, so that nothing is
        deleted afterwards. ValueError as `storage.load`, before anything changes."""
        if hdfs_path is not None:
            raise ValueError(f"hdfs_path = {hdfs_path!r}: checkpoints come from local_path only")
        storage.load(self.trains(), Path(local_path), self.checkpoint_config.load_contents)
        self.check.sent()


class Mode(BaseEngineCtx):  # type: ignore[misc]
    """The engine in one of verl's two modes."""

    def __enter__(self) -> None:
        """Fetch what is offloaded, and tell the model."""
        super().__enter__()
        self.engine.model.train(self.mode == "train")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Forget the gradients, so that none survives a stop; cut what is whole, and offload."""
        if self.mode == "train" and (self.zero_grad_on_exit or kind is not None):
            self.engine.optimizer_zero_grad()
        if isinstance(self.engine.model, FSDPModule):
            self.engine.model.reshard()  # the root stays whole after a forward; a load must not leave it so
        super().__exit__(kind, error, trace)


def schedule(optimizer: torch.optim.Optimizer, config: Any) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate's schedule of an FSDPOptimizerConfig, by verl's own functions."""
    warmup = config.lr_warmup_steps
    if warmup is None or warmup <= 0:
        warmup = int(config.lr_warmup_steps_ratio * config.total_training_steps)
    made: torch.optim.lr_scheduler.LRScheduler
    if config.lr_scheduler_type == "constant":
        made = get_constant_schedule_with_warmup(optimizer, num_warmup_steps=warmup)
        return made
    made = get_cosine_schedule_with_warmup(
        optimizer=optimizer,
        num_warmup_steps=warmup,
        num_training_steps=config.total_training_steps,
        min_lr_ratio=config.min_lr_ratio,
        num_cycles=config.num_cycles,
        zero_indexed_step=config.zero_indexed_step,
    )
    return made
