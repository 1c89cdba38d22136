"""verl's batches, jagged and never padded, through our training forward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.dataset_utils import DatasetPadMode
from verl.utils.torch_functional import entropy_from_logits

import unified_models as um
from unified_models.model import LanguageModel

NOT_FOLLOWED = (
    "calculate_sum_pi_squared",
    "distillation_use_topk",
    "distillation_only",
    "enable_routing_replay",
    "use_prefix_grouper",
)


def refuse_batch(batch: Any) -> None:
    """ValueError naming what a batch (TensorDict) asks for that this engine does not do."""
    mode = tu.get_non_tensor_data(batch, "pad_mode", DatasetPadMode.NO_PADDING)
    if mode != DatasetPadMode.NO_PADDING or not batch["input_ids"].is_nested:
        raise ValueError(
            f"input_ids of pad_mode {mode}: the unified engine takes jagged sequences only"
        )
    for key in NOT_FOLLOWED:
        if tu.get_non_tensor_data(batch, key, False):
            raise ValueError(f"{key} is set in the batch; the unified engine does not follow it")
    for key in ("multi_modal_inputs", "routed_experts"):
        if key in batch:
            raise ValueError(f"the batch has {key}; the unified engine takes token ids only")


def temperatures(batch: Any) -> list[float]:
    """The temperature of each sequence: verl gives one number for all, or a tensor [S]."""
    value, count = batch["temperature"], len(batch["input_ids"].offsets()) - 1
    if isinstance(value, Tensor) and value.dim() > 0:
        return [float(t) for t in value]
    return [float(value)] * count


def outputs(
    model: LanguageModel,
    batch: Any,
    *,
    recompute: bool,
    rows: int,
    provider: str,
) -> dict[str, Tensor]:
    """{"log_probs": jagged float32 [S, length]}, differentiable; with calculate_entropy in the batch, "entropy" too.

    As in verl, position i holds what is said of token i + 1. The last of a sequence has no next token: its logprob is 0
    and nothing reads it. The entropy is that of softmax(logits / T) at every position; it asks for the logits again.
    """
    ids = batch["input_ids"]
    sequences = [sequence.tolist() for sequence in ids.unbind()]
    at = temperatures(batch)
    kept: list[tuple[Tensor, Any]] = []
    handle = model.register_forward_hook(lambda _, args, out: kept.append((out, args[1])))
    try:
        lps = um.logprobs(model, sequences, at, recompute=recompute, rows=rows, provider=provider)
    finally:
        handle.remove()
    offsets = ids.offsets().to(lps[0].device)
    padded = torch.cat([part for lp in lps for part in (lp, lp.new_zeros(1))])
    told = {"log_probs": torch.nested.nested_tensor_from_jagged(padded, offsets)}
    if tu.get_non_tensor_data(batch, "calculate_entropy", False):
        ((hidden_TM, ctx),) = kept
        lengths = offsets.diff()
        at_T = torch.tensor(at, device=offsets.device).repeat_interleave(lengths)
        values = entropies(lambda h: model.logits(h, ctx), hidden_TM, at_T, rows)
        told["entropy"] = torch.nested.nested_tensor_from_jagged(values, offsets)
    return told


def entropies(
    logits: Callable[[Tensor], Tensor], hidden_TM: Tensor, temperature_T: Tensor, rows: int
) -> Tensor:
    """float32 [T]: the entropy of softmax(logits / T) of each row, `rows` at a time."""

    def score(hidden: Tensor, temperature: Tensor) -> Tensor:
        values: Tensor = entropy_from_logits(logits(hidden) / temperature[:, None])
        return values

    pairs = zip(hidden_TM.split(rows), temperature_T.split(rows), strict=True)
    if torch.is_grad_enabled():
        return torch.cat([checkpoint(score, h, t, use_reentrant=False) for h, t in pairs])
    return torch.cat([score(h, t) for h, t in pairs])
