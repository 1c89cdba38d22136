"""Which process runs what: Megatron's process groups, its configuration, and its wrappers around a model's stages."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    ParamKey,
    ParamPredicate,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.transformer import TransformerConfig

from unified_models.adapters.megatron.module import Stage
from unified_models.context.interface import Experts
from unified_models.context.parallel import Parallel
from unified_models.model import LanguageModel


def held() -> tuple[int, int]:
    """(rank, size) of this process among those that share the experts: `um.load(experts=)`."""
    return (
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_world_size(),
    )


def parallel() -> Parallel:
    """Megatron's groups as a `Parallel`. ValueError: tensor parallelism, which rounds sums in other places."""
    for name, size in (
        ("tensor_model_parallel_size", parallel_state.get_tensor_model_parallel_world_size()),
        ("expert_tensor_parallel_size", parallel_state.get_expert_tensor_parallel_world_size()),
    ):
        if size != 1:
            raise ValueError(f"{name} is {size}: 1 alone gives the bits of one process")
    experts = tokens = None
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        experts = parallel_state.get_expert_model_parallel_group()
    if parallel_state.get_context_parallel_world_size() > 1:
        tokens = parallel_state.get_context_parallel_group()
    return Parallel(experts=experts, tokens=tokens)


def config(model: LanguageModel, **more: Any) -> TransformerConfig:
    """What schedules, wrapper and optimizer read: sizes of the model and of the process groups; `more` goes on top.

    Gradients are sums over tokens divided by their number. Packs have as many tokens as they have, so that stages tell
    each other shapes.
    """
    experts = [m.num_experts for m in model.modules() if isinstance(m, Experts)]
    dtype = torch.float32 if model.numerics == "float32" else torch.bfloat16
    fields: dict[str, Any] = {
        "num_layers": len(model.blocks),
        "hidden_size": model.config.hidden_size,
        "num_attention_heads": model.config.num_attention_heads,
        "num_moe_experts": experts[0] if experts else None,
        "moe_token_dispatcher_type": "alltoall",
        "pipeline_model_parallel_size": parallel_state.get_pipeline_model_parallel_world_size(),
        "virtual_pipeline_model_parallel_size": chunks() if chunks() > 1 else None,
        "context_parallel_size": parallel_state.get_context_parallel_world_size(),
        "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "variable_seq_lengths": True,
        # Interleaved, two processes that are each other's next would mix up what they send in one batch.
        "overlap_p2p_comm": chunks() > 1,
        "batch_p2p_comm": chunks() == 1,
        "calculate_per_token_loss": True,
        "gradient_accumulation_fusion": False,
        "finalize_model_grads_func": finalize_model_grads,
    }
    return TransformerConfig(**(fields | more))


def chunks() -> int:
    """Stages of one process: more than one where the pipeline is interleaved."""
    return parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1


def stages(blocks: int, count: int, sizes: Sequence[int] | None = None) -> list[range]:
    """Blocks cut into `count` stages, of the given sizes or of sizes that differ by one at most.

    ValueError: sizes that are not `count` positive numbers with the sum `blocks`, or fewer blocks than stages.
    """
    if sizes is None:
        sizes = [(i + 1) * blocks // count - i * blocks // count for i in range(count)]
    if len(sizes) != count or sum(sizes) != blocks or min(sizes) < 1:
        raise ValueError(
            f"stages of {list(sizes)} blocks: expected {count}, {blocks} blocks in all"
        )
    return [range(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


def wrap(
    model: LanguageModel,
    ddp: DistributedDataParallelConfig,
    *,
    recompute: bool = False,
    sizes: Sequence[int] | None = None,
    config: Callable[[LanguageModel], TransformerConfig] = config,
) -> list[DistributedDataParallel]:
    """This process's stages of a loaded model, each in Megatron's data-parallel wrapper; the weights become theirs.

    recompute: activation checkpointing by block. sizes: blocks of every stage, in the order that tokens meet them.

    Raises ValueError for gradients that are not added in float32, parameters that are gathered while forwards run,
    whose packed bytes would be older, tensor parallelism, stages of fixed lengths, a loss that is no sum over tokens,
    and a model that holds other experts than this process.
    """
    if not ddp.grad_reduce_in_fp32:
        raise ValueError("grad_reduce_in_fp32 is False: gradients are float32, and added so")
    if ddp.overlap_param_gather:
        raise ValueError(
            "overlap_param_gather is True: packed bytes are derived from whole masters"
        )
    groups, settings = parallel(), config(model)
    for field in ("variable_seq_lengths", "calculate_per_token_loss"):
        if not getattr(settings, field):
            raise ValueError(f"{field} is False: packs have as many tokens as they have")
    check_experts(model)
    pp, here = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_pipeline_model_parallel_rank(),
    )
    cut = stages(len(model.blocks), pp * chunks(), sizes)
    out = []
    for chunk in range(chunks()):
        blocks = cut[chunk * pp + here]
        number = chunk if chunks() > 1 else None
        stage = Stage(settings, model, groups, blocks, recompute=recompute, vp_stage=number)
        out.append(DistributedDataParallel(settings, ddp, stage, disable_bucketing=chunk > 0))
    return out


def check_experts(model: LanguageModel) -> None:
    """ValueError: a model that holds other experts than this process."""
    rank, size = held()
    for experts in model.modules():
        if isinstance(experts, Experts):
            first, stack = experts.up.first, experts.up.stack
            if (first * size, experts.up.shape[0] * size) != (rank * stack, stack):
                raise ValueError(
                    f"{experts.up.label} holds {experts.up.shape[0]} of {stack} experts from {first}: "
                    f"load with experts={(rank, size)}"
                )


def overrides(settings: OptimizerConfig) -> dict[ParamKey, Any]:
    """Megatron's own, and a group for float32 parameters: in one group with others its checkpoints mix up their states
    (Megatron-LM issue 2777, in 0.19.2)."""
    apart = ParamKey(predicate=ParamPredicate("float32", lambda p: p.dtype == torch.float32))
    return {**get_standard_config_overrides(settings), apart: {"max_lr": settings.lr}}


def optimizer(
    stages: Sequence[DistributedDataParallel], settings: OptimizerConfig, **more: Any
) -> MegatronOptimizer:
    """Megatron's optimizer over these stages; packed bytes follow its steps. more: of get_megatron_optimizer."""
    made = get_megatron_optimizer(
        settings, list(stages), **({"config_overrides": overrides(settings)} | more)
    )
    commit_after(made, stages)
    return made


def commit_after(optimizer: MegatronOptimizer, stages: Sequence[DistributedDataParallel]) -> None:
    """Commit the stages after each of the optimizer's steps, and after it loaded a state: it holds float32 parameters
    in place."""

    def committing(change: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **kwargs: Any) -> Any:
            done = change(*args, **kwargs)
            for stage in stages:
                stage.module.commit()
            return done

        return changed

    optimizer.step = committing(optimizer.step)
    optimizer.load_state_dict = committing(optimizer.load_state_dict)
