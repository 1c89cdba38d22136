"""The one class that vLLM builds for every architecture of the zoo."""

import logging
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from vllm.config import VllmConfig

from unified_models import registry
from unified_models.adapters.vllm import report
from unified_models.adapters.vllm.backend import Metadata
from unified_models.adapters.vllm.caches import Cache, caches, level
from unified_models.adapters.vllm.config import NUMERICS, paged
from unified_models.adapters.vllm.memory import VllmMemory, waves
from unified_models.adapters.vllm.paged import PageMemory
from unified_models.adapters.vllm.watch import Watch
from unified_models.adapters.vllm.weights import load, still_missing
from unified_models.checkpoint.shards import Shards, some
from unified_models.checkpoint.sync import update
from unified_models.context.local import LocalContext
from unified_models.context.slots import Slot, State
from unified_models.context.step import DeviceStep, Step
from unified_models.model import LanguageModel
from unified_models.weight import Weight


class UnifiedForCausalLM(nn.Module):
    """A model file of ours behind vLLM's interface: ids and a step in, hidden rows and logits out."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        raw = vllm_config.model_config.hf_config.raw
        module = registry.find(raw["model_type"])
        self.numerics: str = (vllm_config.additional_config or {}).get("numerics", NUMERICS[0])
        # Called `model`, as in vLLM's own classes: verl looks there. Not a child module: vLLM's reload would replace
        # every child's tensors by empty ones and wait for loaders of its own kind. Ours change in place, all at once,
        # after everything was checked.
        self.model: LanguageModel
        # On no device: it will hold packed bytes only, and they come with the checkpoint.
        with torch.device("meta"):
            self.__dict__["model"] = module.Model(module.Config.from_json(raw))
        self.model.requires_grad_(False)
        self.model.name_parts()
        if self.numerics == "float32":
            for slot in self.model.slots().values():
                slot.plain()
        page_tokens = vllm_config.cache_config.block_size
        made = list(
            caches(self.model.slots().values(), page_tokens, f"{prefix}." if prefix else "")
        )
        level(made, prefixes=bool(vllm_config.cache_config.enable_prefix_caching))
        known = vllm_config.compilation_config.static_forward_context
        for cache in made:
            if cache.layer_name in known:
                raise ValueError(f"two caches are called {cache.layer_name}")
            known[cache.layer_name] = cache
        self.caches: list[Cache] = made
        self.by_slot: dict[Slot, Cache] = {s: cache for cache in made for s in cache.slots}
        for cache in made:
            if isinstance(cache.slot, State):
                self.by_slot |= dict.fromkeys((cache.slot.open, *cache.short), cache)
        self.filled, self.missing = False, set[str]()
        self.device = torch.device(vllm_config.device_config.device)
        self.groups: list[report.Group] = []
        self.paged = paged(vllm_config) is None
        self.most = vllm_config.model_config.max_model_len
        self.nan = Watch()

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Rows of the embedding; vLLM asks a text model for it, and calls `forward` with ids."""
        ctx = LocalContext(Step.of([len(input_ids)], device=input_ids.device))
        return ctx.embed(input_ids.long(), cast(Weight, self.model.embed))

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        """Hidden rows of all tokens, those of padding zero. Without metadata (vLLM measures memory) one pack."""
        self.require_whole()
        metadata = self.caches[0].metadata
        if metadata is None:
            step = Step.of([len(input_ids)], device=input_ids.device)
            ctx = LocalContext(step)
        else:
            self._tell_groups()
            if self.paged:
                starts_S1, total_S = metadata.starts_S1, metadata.total_S
                step = DeviceStep(starts_S1, total_S, len(input_ids), self.most)
                ctx = LocalContext(step, PageMemory(self.by_slot))  # type: ignore[arg-type]
                return self.model(input_ids.long(), ctx)  # type: ignore[no-any-return]
            order = waves(self.caches, metadata)
            if len(order) > 1:
                return self._in_waves(input_ids, metadata, order)
            step = Step.of(metadata.lengths, metadata.past, input_ids.device)
            ctx = LocalContext(step, VllmMemory(step, self.by_slot))
        hidden: Tensor = self.model(input_ids[: step.num_tokens].long(), ctx)
        missing = len(input_ids) - step.num_tokens
        return F.pad(hidden, (0, 0, 0, missing)) if missing else hidden

    def _in_waves(
        self, input_ids: Tensor, metadata: Metadata, order: Sequence[Sequence[int]]
    ) -> Tensor:
        """The hidden rows of a step whose requests cannot all run at once; no row knows the difference."""
        starts = [0, *accumulate(metadata.lengths)]
        hidden = torch.zeros(0)
        for members in order:
            lengths, past = ([of[s] for s in members] for of in (metadata.lengths, metadata.past))
            step = Step.of(lengths, past, input_ids.device)
            rows = [row for s in members for row in range(starts[s], starts[s + 1])]
            at = torch.tensor(rows, device=input_ids.device)
            ctx = LocalContext(step, VllmMemory(step, self.by_slot, members))
            part = self.model(input_ids[at].long(), ctx)
            if not hidden.numel():
                hidden = part.new_zeros(len(input_ids), *part.shape[1:])
            hidden[at] = part
        return hidden

    def _tell_groups(self) -> None:
        """Once: the blocks that vLLM made of our pages, and what is lost in them."""
        if not self.groups:
            self.groups = report.groups(self.caches)
            log = logging.getLogger("vllm.unified_models")
            for group in self.groups:
                log.info("%s, %d bytes lost", group, group.lost)

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """float32 [rows, vocabulary]. FloatingPointError: a NaN, as from pages of other weights; on a GPU, which nobody
        waits for, in a later call. RuntimeError: weights are missing, which a recorded forward does not look for."""
        self.require_whole()
        ctx = LocalContext(Step.of([len(hidden_states)], device=hidden_states.device))
        logits = self.model.logits(hidden_states, ctx)
        self.nan.look(logits)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """A checkpoint's tensors, packed ones with their scales; later also masters by their checkpoint names, in as
        many calls as the sender likes: no forward runs until all have come.

        What the caches hold is of the old weights then, and is spoilt: read by mistake, it shows.
        """
        return self.load_shards(weights)

    def load_shards(self, weights: Iterable[tuple[str, Tensor]] | Shards) -> set[str]:
        """`load_weights`, also of tensors that are read one at a time."""
        names = load(self.model, weights, self.numerics, self.filled, self.device)
        if not self.filled:
            logging.getLogger("vllm.unified_models").info(
                "%s", report.text(self.model, self.caches)
            )
        self.filled, missing = True, still_missing(self.model, self.missing, names)
        self._replaced(missing)
        return names

    def replace_weights(self, masters: Iterable[tuple[str, Tensor]]) -> None:
        """All masters and tables in one call. ValueError listing every problem, as `checkpoint.update`; nothing has
        changed then."""
        update(self.model, masters)
        self._replaced(set())

    def _replaced(self, missing: set[str]) -> None:
        self.missing = missing
        for _, weight in self.model.weights():
            weight.refresh()
        for cache in self.caches:
            cache.spoil()

    def require_whole(self) -> None:
        """RuntimeError: an update of the weights has begun, and not ended."""
        if self.missing:
            raise RuntimeError(
                f"{len(self.missing)} tensors of the new weights have not come: {some(sorted(self.missing))}"
            )
