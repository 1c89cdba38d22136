"""What the tests run in verl's environment: `python child.py FOLDER`. The last line printed is JSON.

FOLDER holds nemotron_h/ and deepseek_v4/, tiny checkpoints.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from verl import DataProto
from verl.trainer.config import CheckpointConfig
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.utils import tensordict_utils as tu
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.workers.config import ActorConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import EngineRegistry
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

import unified_models as um
from unified_models.adapters.verl import UnifiedEngineConfig
from unified_models.checkpoint import update
from unified_models.verify.compare import UnequalError, bits, patterns

NAMES = ("nemotron_h", "deepseek_v4")
TEMPERATURE = 0.7
PROMPTS = [[5, 6, 7], [8, 9, 10, 11, 12, 13, 14], [20, 21], [30, 31, 32, 33, 34]]
LENGTHS = [9, 4, 12, 7]


def engine(folder: Path, lr: float = 1e-3, warmup: int = -1, **settings: Any) -> Any:
    """By name, with verl's own configs, initialised."""
    made = EngineRegistry.new(
        model_type="language_model",
        backend="unified",
        model_config=HFModelConfig(path=str(folder), load_tokenizer=False),
        engine_config=UnifiedEngineConfig(**settings),
        optimizer_config=FSDPOptimizerConfig(lr=lr, lr_warmup_steps=warmup),
        checkpoint_config=CheckpointConfig(),
    )
    made.initialize()
    return made


def rollout(model: Any) -> list[tuple[list[int], Tensor]]:
    """(sampled ids, their logprobs) of each prompt, by our engine."""
    server = um.Engine(model, cache_tokens=1024, step_tokens=16, max_sequences=3)
    asked = [
        um.Sampling(max_tokens=n, temperature=TEMPERATURE, seed=i) for i, n in enumerate(LENGTHS)
    ]
    return [(out.ids, out.logprobs) for out in server.generate(PROMPTS, asked)]


def batch(outs: list[tuple[list[int], Tensor]], **more: Any) -> TensorDict:
    """As verl's trainer makes it: prompts padded left, responses right, then its own unpadding. The third response has
    tokens in between that the policy did not say."""
    count, left, right = len(outs), max(map(len, PROMPTS)), max(LENGTHS)
    wide = {
        name: torch.zeros(count, left + right, dtype=torch.long) for name in ("ids", "on", "at")
    }
    mask = torch.zeros(count, right, dtype=torch.long)
    lps = torch.zeros(count, right)
    for i, (prompt, (said, said_lps)) in enumerate(zip(PROMPTS, outs, strict=True)):
        row = slice(left - len(prompt), left + len(said))
        wide["ids"][i, row] = torch.tensor(prompt + list(said))
        wide["on"][i, row] = 1
        wide["at"][i, row] = torch.arange(len(prompt) + len(said))
        mask[i, : len(said)] = 1
        lps[i, : len(said)] = torch.as_tensor(said_lps)
    mask[2, 3:5] = 0
    lps[2, 3:5] = -99.0
    fields = {
        "input_ids": wide["ids"],
        "attention_mask": wide["on"],
        "position_ids": wide["at"],
        "prompts": wide["ids"][:, :left],
        "responses": wide["ids"][:, left:],
        "response_mask": mask,
        "rollout_log_probs": lps,
        "advantages": torch.linspace(-1, 1, count)[:, None].expand_as(lps).contiguous(),
    }
    data = left_right_2_no_padding(TensorDict(fields, batch_size=count))
    plain = {
        "temperature": TEMPERATURE,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": 2,
        "global_batch_size": count,
        "calculate_entropy": True,
    }
    tu.assign_non_tensor(data, **(plain | more))
    return data


def for_update(data: TensorDict, old: Tensor, **more: Any) -> TensorDict:
    """The same batch with what a loss reads."""
    data = data.copy()
    data["old_log_probs"] = old
    tu.assign_non_tensor(data, **more)
    return data


LOSS = partial(
    ppo_loss,
    config=ActorConfig(
        strategy="unified", rollout_n=1, ppo_micro_batch_size_per_gpu=2, entropy_coeff=0.01
    ),
)


def infer(made: Any, data: TensorDict) -> dict[str, Tensor]:
    with made.eval_mode():
        told = made.infer_batch(data.copy())["model_output"]
    return {name: no_padding_2_padding(values, data) for name, values in told.items()}


def train(made: Any, data: TensorDict) -> dict[str, Any]:
    with made.train_mode():
        told = made.train_batch(data, LOSS)
    told["lr"] = made.lr_scheduler_step()
    return dict(told)


def plain(metrics: dict[str, Any]) -> dict[str, float]:
    """verl's metrics as numbers."""
    return {
        key: float(value.aggregate() if hasattr(value, "aggregate") else value)
        for key, value in metrics.items()
    }


def told_by(call: Callable[[], Any]) -> str:
    """The error of a call."""
    try:
        call()
    except (UnequalError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def masters(made: Any) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in made.training.read().items()}


def unequal(a: dict[str, Tensor], b: dict[str, Tensor]) -> tuple[int, int]:
    """(compared, unequal) bits of two sets of tensors; ValueError: other names."""
    if a.keys() != b.keys():
        raise ValueError(f"{sorted(a.keys() ^ b.keys())} on one side only")
    result = bits([a[n] for n in a], [b[n] for n in a])
    return result.compared, result.unequal


def flipped(data: TensorDict, i: int, j: int) -> TensorDict:
    """One ulp more in one rollout logprob."""
    data = data.copy()
    lps = data["rollout_log_probs"].clone()
    patterns(lps)[i, j] ^= 1
    data["rollout_log_probs"] = lps
    return data


def debug(data: TensorDict, old: Tensor) -> list[float]:
    """verl's own rollout_probs_diff_{valid,max,mean,std}, and k3."""
    lps, mask = data["rollout_log_probs"], data["response_mask"]
    fields = {
        "rollout_log_probs": lps,
        "old_log_probs": old,
        "response_mask": mask,
        "responses": data["responses"],
    }
    told = calculate_debug_metrics(DataProto.from_dict(fields))
    k3 = compute_offpolicy_metrics(old, lps, mask.bool())["k3_kl"]
    names = ("valid", "max", "mean", "std")
    return [*(float(told[f"training/rollout_probs_diff_{name}"]) for name in names), float(k3)]


def on_policy(folder: Path) -> Any:
    """The rollout's logprobs under verl's own metrics and loss; then faults."""
    made = engine(folder)
    outs = rollout(um.load(folder))
    data = batch(outs)
    told = infer(made, data)
    old, mask = told["log_probs"], data["response_mask"]
    whole = [p + list(ids) for p, (ids, _) in zip(PROMPTS, outs, strict=True)]
    again = um.logprobs(um.load(folder), whole, TEMPERATURE)
    mine = bits(
        [row[: len(ids)] for row, (ids, _) in zip(old, outs, strict=True)],
        [lp[len(p) - 1 :] for lp, p in zip(again, PROMPTS, strict=True)],
    )
    found: dict[str, Any] = {
        "class": type(made).__name__,
        "debug": debug(data, old),
        "same_as_logprobs": [mine.compared, mine.unequal],
        "entropy": told["entropy"][mask.bool()].tolist(),
    }
    before = masters(made)
    bad = flipped(data, 2, 6)
    found["token"] = int(data["responses"][2, 6])
    found["patterns"] = [
        f"{int(patterns(t)[2, 6]) & 0xFFFFFFFF:#010x}" for t in (bad["rollout_log_probs"], old)
    ]
    found["debug_of_fault"] = debug(bad, old)[1]
    found["infer_fault"] = told_by(lambda: infer(made, bad))
    found["train_fault"] = told_by(lambda: train(made, for_update(bad, old)))
    found["masked_fault"] = told_by(lambda: infer(made, flipped(data, 2, 4)))
    silent = data.copy()
    silent["response_mask"] = torch.zeros_like(mask)
    found["nothing"] = told_by(lambda: infer(made, silent))
    found["after_faults"] = unequal(before, masters(made))
    found["gradients"] = sum(p.grad is not None for p in made.model.parameters())
    found["missing"] = told_by(
        lambda: train(made, for_update(data.exclude("rollout_log_probs"), old))
    )
    step = train(made, for_update(data, old))
    found["step"] = plain(step["metrics"])
    found["loss"] = step["loss"]
    found["after_step"] = unequal(before, masters(made))
    return found | moved(made, data, old)


def moved(made: Any, data: TensorDict, old: Tensor) -> dict[str, Any]:
    """Updates after the first: under weights that the rollout does not have."""
    found: dict[str, Any] = {"second": plain(train(made, for_update(data, old))["metrics"])}
    found["second_fault"] = told_by(lambda: train(made, for_update(flipped(data, 0, 0), old)))
    made.get_per_tensor_param()
    found["stale"] = told_by(lambda: infer(made, data))
    made.check.sent()
    made.check.stepped()
    found["bypass"] = told_by(lambda: train(made, for_update(data, data["rollout_log_probs"])))
    made.check.mode = "report"
    made.check.sent()
    found["report"] = plain(train(made, for_update(data, old))["metrics"])
    return found


def resume(folder: Path) -> Any:
    """Three steps, saved, a fourth; and by another engine from the checkpoint."""
    kept = folder.parent / f"{folder.name}-saved" / "actor"
    first, other = (engine(folder, warmup=5, check="off") for _ in range(2))
    data = batch(rollout(um.load(folder)))
    old = infer(first, data)["log_probs"]
    for _ in range(3):
        train(first, for_update(data, old))
    torch.manual_seed(11)
    torch.rand(3)
    first.save_checkpoint(str(kept), global_step=3, max_ckpt_to_keep=1)
    state, moments = masters(first), {n: t.clone() for n, t in first.training.moments().items()}
    drawn = torch.rand(4)
    here = infer(first, data)
    fourth = train(first, for_update(data, old))
    torch.manual_seed(99)
    other.load_checkpoint(str(kept))
    found: dict[str, Any] = {
        "masters": unequal(state, masters(other)),
        "moments": unequal(moments, other.training.moments()),
        "random": unequal({"": drawn}, {"": torch.rand(4)}),
        "first": unequal(here, infer(other, data)),
        "weights_sent": unequal(
            dict(um.named_tensors(other.model)), dict(other.get_per_tensor_param()[0])
        ),
    }
    again = train(other, for_update(data, old))
    found["fourth"] = [plain(t["metrics"]) | {"lr": t["lr"]} for t in (fourth, again)]
    found["after"] = unequal(masters(first), masters(other))
    found["files"] = sorted(p.name for p in kept.parent.iterdir())
    fresh = um.load(folder)
    update(fresh, other.get_per_tensor_param()[0])
    lps = [rollout(model) for model in (fresh, other.model)]
    found["rollout"] = unequal(*({str(i): o[1] for i, o in enumerate(outs)} for outs in lps))
    (kept / "extra-0-of-1.json").rename(kept / "extra-0-of-2.json")
    found["processes"] = told_by(lambda: other.load_checkpoint(str(kept)))
    first.checkpoint_config.save_contents[:] = ["model", "hf_model"]
    first.save_checkpoint(str(kept))
    found["partial"] = told_by(lambda: other.load_checkpoint(str(kept)))
    found["official"] = unequal(
        *(dict(um.named_tensors(m)) for m in (first.model, um.load(kept / "hf_model")))
    )
    found["absent"] = told_by(lambda: other.load_checkpoint(str(kept.parent / "nothing")))
    return found


def still(folder: Path) -> Any:
    """lr = 0: a step leaves every weight; lr > 0, the control, does not."""
    found = {}
    data = batch(rollout(um.load(folder)))
    for lr in (0.0, 1e-3):
        made = engine(folder, lr=lr)
        before = masters(made)
        metrics = plain(train(made, for_update(data, infer(made, data)["log_probs"]))["metrics"])
        found[str(lr)] = [*unequal(before, masters(made)), metrics["grad_norm"]]
        if lr == 0:
            found["same"] = unequal(before, masters(engine(folder)))
    return found


JOBS: tuple[Callable[[Path], Any], ...] = (on_policy, resume, still)

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    print(json.dumps({name: {job.__name__: job(folder / name) for job in JOBS} for name in NAMES}))
