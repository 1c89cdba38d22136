"""Real vLLM on a model of any config.json with random weights: its bits against the training forward in the same
process, over the same packed bytes.

`python -m unified_models.adapters.vllm.full CONFIG [KEY=VALUE ...]`: keys of config.json, or of `Load` behind a dot.
Requests come at once, sample at temperature 1 and preempt each other; half way, every weight is replaced.
"""

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

import unified_models as um
from unified_models.adapters.vllm.plugin import CONFIG_FORMAT, found, unknown
from unified_models.adapters.vllm.verify import ENVIRONMENT
from unified_models.arguments import assignments
from unified_models.config import load_json
from unified_models.ops.linear import narrow
from unified_models.ops.operator import observe
from unified_models.verify.compare import Comparison, bits
from unified_models.warm.compiling import warm_apart

NOT_OURS = ("auto_map",)
"""Keys of a config.json that would make vLLM's own class look for files."""
NEEDED = {"deepseek_v4": {"kv_cache_dtype": "fp8"}}
"""model_type -> what vLLM's own class does not start without."""
SENT = 1 << 30
"""Bytes of masters in one call of an update: all of them would not fit beside the caches."""

PACK = 16384
"""Tokens of the training forward, about: as many, and a sequence."""


@dataclass(frozen=True)
class Load:
    """What is run. shortest, prompt: the least and the most tokens of one; tokens: sampled by each request; budget:
    tokens of a step; length: of the longest sequence. memory: the share of the GPU's. cache: GiB of vLLM's caches, and
    nothing of the process takes more than that share then; 0: what is left of it, for which nothing else may use the
    GPU meanwhile. blocks: of its caches, 0: as many as fit. update: replace the weights half way."""

    requests: int = 256
    shortest: int = 1
    prompt: int = 300
    tokens: int = 200
    concurrent: int = 128
    budget: int = 2048
    length: int = 1024
    memory: float = 0.8
    cache: float = 0
    blocks: int = 0
    update: bool = True
    graphs: str = "FULL"
    seed: int = 0


@dataclass
class Told:
    """The tokens of one request so far, and the logprobs that vLLM reported."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    compared: int = 0


def write_config(file: Path, changes: dict[str, Any], folder: Path) -> None:
    """config.json alone: the file's, with other values, and with the formats of its weights where it has them."""
    raw = load_json(file) | changes
    (folder / "config.json").write_text(
        json.dumps({k: v for k, v in raw.items() if k not in NOT_OURS})
    )


def start(folder: Path, load: Load, *, ours: bool = True, **options: Any) -> Any:
    """vLLM on random weights, as our class or as vLLM's own. Ours compiles DeepGEMM's kernels first."""
    from vllm import LLM

    from unified_models.adapters.vllm.random import FORMAT

    given: dict[str, Any] = {
        "load_format": FORMAT,
        "skip_tokenizer_init": True,
        "max_model_len": load.length,
        "max_num_seqs": load.concurrent,
        "max_num_batched_tokens": load.budget,
        "gpu_memory_utilization": load.memory,
        "enable_prefix_caching": False,
        "seed": load.seed,
        "disable_log_stats": False,
    }
    if load.cache:
        given |= {"kv_cache_memory_bytes": int(load.cache * 2**30), "gpu_memory_utilization": 0.01}
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(load.memory)
    if load.blocks:
        given["num_gpu_blocks_override"] = load.blocks
    if ours:
        if torch.cuda.is_available() and narrow.deep_gemm_release() is not None:
            warm_apart(folder, load.budget)
        given["config_format"] = CONFIG_FORMAT
        given["compilation_config"] = {"cudagraph_mode": load.graphs}
    else:
        given |= NEEDED.get(load_json(folder / "config.json")["model_type"], {})
    return LLM(str(folder), **given | options)


def model_of(llm: Any) -> Any:
    """Our class in the engine, which runs in this process."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner.get_model()


def sampled(llm: Any, prompts: Sequence[Sequence[int]], tokens: int) -> Iterator[dict[int, Told]]:
    """What is known after each step."""
    from vllm import SamplingParams

    engine, told = llm.llm_engine, {i: Told() for i in range(len(prompts))}
    params = SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    while engine.has_unfinished_requests():
        for out in engine.step():
            one, of = out.outputs[0], told[int(out.request_id)]
            for place in range(len(of.ids), len(one.token_ids)):
                token = one.token_ids[place]
                of.ids.append(token)
                of.logprobs.append(one.logprobs[place][token].logprob)
        yield told


@torch.no_grad()
def compared(model: Any, prompts: Sequence[Sequence[int]], told: dict[int, Told]) -> Comparison:
    """Every token since the last comparison against the training forward, in packs."""
    total, waiting = Comparison(0, 0), list[int]()

    def flush() -> Comparison:
        sequences = [[*prompts[i], *told[i].ids] for i in waiting]
        again = um.logprobs(model, sequences)
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        for i, lp in zip(waiting, again, strict=True):
            first = told[i].compared
            sides[0].append(torch.tensor(told[i].logprobs[first:], dtype=torch.float32))
            sides[1].append(lp[len(prompts[i]) - 1 + first :].cpu())
            told[i].compared = len(told[i].ids)
        waiting.clear()
        return bits(*sides)

    size = 0
    for i, of in told.items():
        if of.compared < len(of.ids):
            waiting.append(i)
            size += len(prompts[i]) + len(of.ids)
        if size >= PACK:
            total, size = total + flush(), 0
    return total + flush() if waiting else total


def changed(model: Any) -> Iterator[tuple[str, Tensor]]:
    """The next version of every tensor: tables as they are, masters of what the packed bytes hold, trained matrices a
    little off."""
    from unified_models.checkpoint.names import Names
    from unified_models.checkpoint.sync import values_of
    from unified_models.tiny import rule
    from unified_models.weight import Weight

    for part in Names.of(model).parts:
        values, owner = values_of(part), part.owner
        if isinstance(owner, Weight):
            if not owner.frozen and (owner.init or rule(owner)) in ("matrix", "vocab"):
                values = torch.randn_like(values).mul_(0.02).add_(1).mul_(values)
            values = values.to(torch.float32 if owner.exact else torch.bfloat16)
        yield part.name, values


def replace_all(ours: Any) -> None:
    """Give our class the next version, in calls of about SENT bytes; no forward runs before the last."""
    waiting: list[tuple[str, Tensor]] = []
    size = 0
    for name, values in changed(ours.model):
        waiting.append((name, values))
        size += values.nbytes
        if size >= SENT:
            ours.load_weights(waiting)
            waiting, size = [], 0
    if waiting:
        ours.load_weights(waiting)


def control(model: Any, sequence: Sequence[int]) -> int:
    """Logprobs that change when one row of one operator is off by one unit in the last place."""
    left = 2

    def fault(name: str, out: Any) -> Any:
        nonlocal left
        if name == "rms_norm" and isinstance(out, Tensor) and len(out) == len(sequence):
            left -= 1
            if left == 0:
                out = out.clone()
                out[len(sequence) // 2].view(torch.int16).add_(1)
        return out

    with torch.no_grad():
        (clean,) = um.logprobs(model, [sequence])
        with observe(fault):
            (wrong,) = um.logprobs(model, [sequence])
    return int((clean.view(torch.int32) != wrong.view(torch.int32)).sum())


def run(file: Path, changes: dict[str, Any], load: Load) -> dict[str, Any]:
    """Everything, in this process; counts and seconds."""
    random, began = Random(load.seed), time.perf_counter()
    with TemporaryDirectory() as name:
        write_config(file, changes, Path(name))
        llm = start(Path(name), load)
    ours = model_of(llm)
    vocab = ours.model.config.vocab_size
    prompts = [
        [random.randrange(vocab) for _ in range(random.randint(load.shortest, load.prompt))]
        for _ in range(load.requests)
    ]
    report: dict[str, Any] = {"vllm": found(), "start": time.perf_counter() - began}
    began, total, updated, steps, told = (
        time.perf_counter(),
        Comparison(0, 0),
        not load.update,
        0,
        {},
    )
    seconds = 0.0
    for told in sampled(llm, prompts, load.tokens):
        steps += 1
        if (
            not updated
            and sum(len(of.ids) for of in told.values()) * 2 >= load.requests * load.tokens
        ):
            seconds -= time.perf_counter()
            total, updated = total + compared(ours.model, prompts, told), True
            report["before update"] = str(total)
            replace_all(ours)
            llm.reset_prefix_cache(reset_running_requests=True)
            seconds += time.perf_counter()
    report["sampling"] = time.perf_counter() - began - seconds
    counts = {m.name: m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"}
    began = time.perf_counter()
    total = total + compared(ours.model, prompts, told)
    report["comparing"] = time.perf_counter() - began
    report |= {
        "steps": steps,
        "preemptions": sum(counts.values()),
        "compared": total.compared,
        "unequal": total.unequal,
        "control": control(ours.model, [*prompts[0], *told[0].ids]),
        "graphs": str(llm.llm_engine.vllm_config.compilation_config.cudagraph_mode),
    }
    if torch.cuda.is_available():
        report["reserved_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 1)
    return report


def main(arguments: Sequence[str]) -> int:
    """CONFIG [KEY=VALUE ...]. 1: a bit differs, too little was compared, or the control found nothing."""
    file, *rest = arguments
    if reason := unknown(found()):
        raise SystemExit(reason)
    given = dict(assignments(rest))
    load = replace(Load(), **{k[1:]: v for k, v in given.items() if k.startswith(".")})
    report = run(Path(file), {k: v for k, v in given.items() if not k.startswith(".")}, load)
    print(json.dumps(report, indent=1))
    wanted = load.requests * load.tokens
    return 0 if not report["unequal"] and report["compared"] == wanted and report["control"] else 1


if __name__ == "__main__":
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    sys.exit(main(sys.argv[1:]))
