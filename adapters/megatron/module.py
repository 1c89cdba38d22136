"""A pipeline stage of a zoo model as Megatron's modules are: what came in, what goes on, and what a checkpoint holds.

Megatron keeps float32 main parameters in its optimizer and gives forwards the parameters of the module. Those are
here the masters in bfloat16, and pack(bf16(main)) is what pack(main) is. Masters of weights that are read in float32
stay float32.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from megatron.core.utils import make_viewless_tensor
from torch import Tensor, nn

import unified_models as um
from unified_models.context.interface import Experts
from unified_models.context.parallel import Parallel
from unified_models.model import LanguageModel
from unified_models.training import Pack, Recomputed
from unified_models.weight import Weight


@dataclass(frozen=True)
class Module:
    """Where a master lies that Megatron's optimizer writes (`weight.Sharding`): in the module, whole."""

    owned: Tensor
    resident: bool = True
    group: None = None

    def meet(self, master: Tensor | None) -> None:
        """It is the module's own parameter at every reading."""

    def renew(self) -> None:
        """It is whole at all times."""


class Elsewhere(nn.Module):
    """Stands for a block of another stage, so that those that are here keep their numbers."""


class Part(LanguageModel):
    """A stage for one microbatch, in place of the whole model: `um.logprobs` runs it.

    given: what the stage before handed on, [T, *row]; None on the first stage.
    """

    def __init__(
        self, model: LanguageModel, blocks: list[nn.Module], given: Tensor | None, last: bool
    ) -> None:
        super().__init__()
        self.config, self.model, self.given, self.last = model.config, model, given, last
        self.blocks = blocks  # type: ignore[assignment]

    def start(self, ids_T: Tensor, ctx: Any) -> Tensor:
        """See `LanguageModel`."""
        return self.model.start(ids_T, ctx) if self.given is None else self.given

    def through(self, block: nn.Module, x: Tensor, ids_T: Tensor, ctx: Any) -> Tensor:
        """See `LanguageModel`."""
        return self.model.through(block, x, ids_T, ctx)

    def finish(self, x: Tensor, ctx: Any) -> Tensor:
        """See `LanguageModel`."""
        return self.model.finish(x, ctx) if self.last else x

    def logits(self, hidden_TM: Tensor, ctx: Any) -> Tensor:
        """See `LanguageModel`."""
        return self.model.logits(hidden_TM, ctx)


class Stage(MegatronModule):  # type: ignore[misc]
    """Blocks [blocks.start, blocks.stop) of a model, with its embedding on the first stage and all that follows the
    blocks on the last.

    Args:
        config: of Megatron; `layout.config` makes one.
        model: loaded, with masters. Its weights become this stage's and change to bfloat16, except those that are read
            in float32; those of other stages are left out.
        parallel: the processes that share the experts or a pack.
        recompute: activation checkpointing by block; the bits stay.
        vp_stage: number of the chunk, where a process has several.

    Raises ValueError for a model without masters.
    """

    model_type = ModelType.encoder_or_decoder

    def __init__(
        self,
        config: TransformerConfig,
        model: LanguageModel,
        parallel: Parallel,
        blocks: range,
        *,
        recompute: bool = False,
        vp_stage: int | None = None,
    ) -> None:
        super().__init__(config)
        for path, weight in model.weights():
            if weight.master is None:
                raise ValueError(
                    f"{path} holds packed bytes only: load with weights='master' to train"
                )
        self.pre_process, self.post_process = blocks.start == 0, blocks.stop == len(model.blocks)
        self.share_embeddings_and_output_weights = getattr(model, "head", None) is None
        self.parallel, self.blocks, self.recompute = parallel, blocks, recompute
        self.vp_stage = vp_stage
        self.given: Tensor | None = None
        self.model = self._cut(model)
        spread = [m for m in self.modules() if isinstance(m, Experts)]
        self.spread = {w for experts in spread for w in experts.modules() if isinstance(w, Weight)}
        for _, weight in self.model.weights():
            self._give(weight)
        self._mark_embeddings()
        self.model.commit()
        self.register_load_state_dict_post_hook(lambda *_: self.model.commit())

    def _cut(self, model: LanguageModel) -> LanguageModel:
        """The model without other stages' modules; the one that was given stays whole."""
        cut = copy.copy(model)
        cut._modules = dict(model._modules)
        for name, child in model.named_children():
            tied = name == "embed" and self.share_embeddings_and_output_weights
            here = self.pre_process if name == "embed" else self.post_process
            if child is not model.blocks and not here and not (tied and self.post_process):
                cut._modules[name] = None
        kept = [block if i in self.blocks else Elsewhere() for i, block in enumerate(model.blocks)]
        cut.blocks = nn.ModuleList(kept)
        return cut

    def _give(self, weight: Weight) -> None:
        """Make a weight's master what Megatron's wrapper and optimizer expect of a parameter."""
        if weight.format.name != "float32":
            weight.to(torch.bfloat16)
        master = weight.master
        assert master is not None
        weight.sharding = Module(master)
        # Megatron adds it to a float32 buffer: rounded to bfloat16 before, sums would differ.
        master.grad_dtype = torch.float32
        master.allreduce = weight not in self.spread  # type: ignore[attr-defined]

    def _mark_embeddings(self) -> None:
        """Tell the optimizer which parameters embed and unembed, and the pipeline which of them are one."""
        for name in ("embed", "head"):
            weight = self.model._modules.get(name)
            if isinstance(weight, Weight):
                master: Any = weight.master
                master.is_embedding_or_output_parameter = True
                copied = name == "embed" and not self.pre_process
                if self.share_embeddings_and_output_weights and not (
                    self.pre_process and self.post_process
                ):
                    master.shared_embedding = True
                    master.shared = copied

    def shared_embedding_or_output_weight(self) -> Tensor | None:
        """The parameter that embeds and unembeds; its gradients are added over the first and the last stage."""
        tied = self.share_embeddings_and_output_weights
        return self.model.embed.master if tied else None  # type: ignore[union-attr, return-value]

    def set_input_tensor(self, input_tensor: Tensor | Sequence[Tensor | None] | None) -> None:
        """What the stage before handed on, [T, 1, C]; the schedules call it before each forward."""
        given = input_tensor if isinstance(input_tensor, Tensor) else (input_tensor or [None])[0]
        self.given = given

    def forward(
        self, sequences: Sequence[Sequence[int]], temperature: float | Sequence[float] = 1.0
    ) -> Tensor:
        """One microbatch, packed. On the last stage float32 [N], the logprobs of `um.logprobs` one behind the other,
        those of this process's stretch with gradients; before, [T, 1, C] for the next stage: rows of all streams.

        Raises ValueError for a microbatch without tokens, except where experts are shared and there is one stage; and
        as `um.logprobs` does.
        """
        alone = self.pre_process and self.post_process
        if not any(sequences) and not (alone and self.parallel.experts is not None):
            raise ValueError(f"a microbatch of {len(sequences)} sequences without a token")
        given = None
        if not self.pre_process:
            assert self.given is not None, "no input tensor was set"
            given = self.given.view(-1, *self.model.row)
        blocks = [self.model.blocks[i] for i in self.blocks]
        part = Part(self.model, blocks, given, self.post_process)
        if self.post_process:
            options: dict[str, Any] = {"recompute": self.recompute, "parallel": self.parallel}
            return torch.cat(um.logprobs(part, sequences, temperature, **options))
        temperatures = [1.0] * len(sequences)
        device = next(self.parameters()).device
        pack = Pack.of(sequences, temperatures, self.parallel.stretches, device)
        ctx, mine = pack.context(None, self.parallel)
        with Recomputed(blocks if self.recompute else ()):
            x = part(pack.ids_T[mine], ctx)
        handed = x.reshape(len(x), 1, -1)
        return make_viewless_tensor(handed, handed.requires_grad, keep_graph=True)  # type: ignore[no-any-return]

    def commit(self) -> None:
        """Derive the packed bytes anew: the optimizer wrote masters where torch does not count changes."""
        for _, weight in self.model.weights():
            weight.bumps += 1
        self.model.commit()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, ShardedTensor]:
        """Masters and tables under their paths in the whole model, so that a checkpoint fits other numbers of stages;
        stacks of experts as stretches of the whole stack."""
        dp_cp = ensure_metadata_has_dp_cp_group(metadata)["dp_cp_group"].rank()
        out = {}
        for path, weight in self.model.weights():
            cut, replica = sharded_offsets, (0, 0, dp_cp)
            if weight in self.spread:
                rank = parallel_state.get_expert_model_parallel_rank()
                size = parallel_state.get_expert_model_parallel_world_size()
                cut = (*cut, (len(cut), rank, size))
                replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
            if path == "embed" and not self.pre_process:
                replica = (1, *replica[1:])
            out[f"{prefix}model.{path}.master"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{path}",
                weight.master,
                *cut,
                replica_id=replica,
                prepend_axis_num=len(sharded_offsets),
            )
        for path, table in self.model.tables():
            out[f"{prefix}model.{path}.data"] = ShardedTensor.from_rank_offsets(
                f"{prefix}{path}", table.data, replica_id=(0, 0, dp_cp)
            )
        return out
