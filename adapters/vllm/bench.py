"""Tokens a second of rollouts in real vLLM, of our class and of vLLM's own on the same random weights.

`unified-models bench --rollouts CONFIG` runs both, each in a process of its own, the order swapped once.
`python -m unified_models.adapters.vllm.bench ours|vllm CONFIG [KEY=VALUE ...]` runs one side; `.profile=true` shows
where a step's time goes.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console
from rich.table import Table

from unified_models.adapters.vllm.full import Load, start, write_config
from unified_models.adapters.vllm.plugin import found, unknown
from unified_models.arguments import assignments
from unified_models.bench.profiled import by_time

CONCURRENT = (256, 32, 1)
ORDER = ("vllm", "ours", "ours", "vllm")
PROMPT, TOKENS = 150, 400
STEPS = 12
"""of a profile"""


def rollout(llm: Any, concurrent: int, vocab: int, seed: int, tokens: int = TOKENS) -> float:
    """Seconds for that many requests at once, each of PROMPT random tokens, until each has sampled `tokens`."""
    from vllm import SamplingParams

    random = Random(seed)
    prompts = [
        {"prompt_token_ids": [random.randrange(vocab) for _ in range(PROMPT)]}
        for _ in range(concurrent)
    ]
    params = SamplingParams(max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False)
    began = time.perf_counter()
    outs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    assert all(len(out.outputs[0].token_ids) == tokens for out in outs), "every token was sampled"
    return seconds


def prompt_logprobs(llm: Any, vocab: int) -> list[float]:
    """Of one random prompt, but for its first token: whether both sides are the same function."""
    from vllm import SamplingParams

    random = Random(0)
    prompt = [random.randrange(vocab) for _ in range(PROMPT)]
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (out,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
    told = zip(prompt[1:], out.prompt_logprobs[1:], strict=True)
    return [round(logprobs[token].logprob, 4) for token, logprobs in told]


def apart(one: Sequence[float], other: Sequence[float]) -> float:
    """The mean distance of two sides' logprobs."""
    return fmean(abs(a - b) for a, b in zip(one, other, strict=True))


def profiled(llm: Any, vocab: int, concurrent: int) -> str:
    """Kernels of STEPS decoding steps by the time that they take, as torch's profiler counts them; in-process only."""
    from torch.profiler import ProfilerActivity, profile
    from vllm import SamplingParams

    random, engine = Random(7), llm.llm_engine
    params = SamplingParams(max_tokens=96, logprobs=0, ignore_eos=True, detokenize=False)
    for i in range(concurrent):
        prompt = [random.randrange(vocab) for _ in range(PROMPT)]
        engine.add_request(f"profiled {i}", {"prompt_token_ids": prompt}, params)
    for _ in range(60):
        engine.step()
    began = time.perf_counter()
    for _ in range(STEPS):
        engine.step()
    seconds = time.perf_counter() - began
    with profile(activities=[ProfilerActivity.CUDA]) as known:
        for _ in range(STEPS):
            engine.step()
    while engine.has_unfinished_requests():
        engine.step()
    busy, lines = by_time(known, STEPS)
    told = f"{concurrent} requests: {seconds / STEPS * 1e3:.2f} ms a step, kernels {busy:.2f} ms"
    return "\n".join([told, *lines])


def run(
    side: str, file: Path, changes: dict[str, Any], load: Load, profile: bool
) -> dict[str, Any]:
    """Tokens a second at each number of requests, the first twice; each is warmed up by a short run."""
    began = time.perf_counter()
    with TemporaryDirectory() as name:
        write_config(file, changes, Path(name))
        llm = start(Path(name), load, ours=side == "ours")
    vocab = llm.model_config.get_vocab_size()
    told: dict[str, Any] = {"side": side, "vllm": found(), "start": time.perf_counter() - began}
    told["prompt"] = prompt_logprobs(llm, vocab)
    for concurrent in (*CONCURRENT, CONCURRENT[0]):
        rollout(llm, concurrent, vocab, 1, 8)
        seconds = rollout(llm, concurrent, vocab, 2)
        told.setdefault(str(concurrent), []).append(round(concurrent * TOKENS / seconds, 1))
        print(json.dumps(told), flush=True)
    if profile:
        for concurrent in (256, 1):
            print(profiled(llm, vocab, concurrent))
    return told


def both(file: Path, changes: Sequence[str] = (), json_file: Path | None = None) -> int:
    """Ours beside vLLM's own: a table, and all that each side told. 1: a side failed. changes: KEY=VALUE."""
    sides: dict[str, list[dict[str, Any]]] = {"vllm": [], "ours": []}
    for side in ORDER:
        command = [sys.executable, "-m", __spec__.name, side, str(file), *changes]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if ran.returncode:
            Console(stderr=True).print(f"{side}: exit status {ran.returncode}", style="red")
            return 1
        sides[side].append(json.loads(ran.stdout.splitlines()[-1]))
    theirs, ours = (told[0]["prompt"] for told in sides.values())
    table = Table(
        "requests", "vLLM's own", "ours", "ours / vLLM's", title=f"tokens a second, {file}",
        caption=f"A prompt's logprobs are {apart(theirs, ours):.3g} apart on average.",
    )  # fmt: skip
    for concurrent in map(str, CONCURRENT):
        theirs, ours = (
            [rate for told in each for rate in told[concurrent]] for each in sides.values()
        )
        cells = (" ".join(f"{rate:,.0f}" for rate in rates) for rates in (theirs, ours))
        table.add_row(concurrent, *cells, f"{median(ours) / median(theirs):.2f}")
    Console().print(table)
    if json_file is not None:
        json_file.write_text(json.dumps(sides, indent=1) + "\n")
    return 0


def main(arguments: Sequence[str]) -> int:
    """SIDE CONFIG [KEY=VALUE ...], or both CONFIG [KEY=VALUE ...] [JSON]."""
    side, file, *rest = arguments
    if reason := unknown(found()):
        raise SystemExit(reason)
    if side == "both":
        changes = [text for text in rest if "=" in text]
        return both(Path(file), changes, *(Path(text) for text in rest if "=" not in text))
    given = dict(assignments(rest))
    profile = bool(given.pop(".profile", False))
    load = replace(
        Load(concurrent=256, budget=8192, memory=0.92),
        **{k[1:]: v for k, v in given.items() if k.startswith(".")},
    )
    keys = {k: v for k, v in given.items() if not k.startswith(".")}
    run(side, Path(file), keys, load, profile)
    return 0


if __name__ == "__main__":
    for key, value in {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }.items():
        os.environ.setdefault(key, value)
    sys.exit(main(sys.argv[1:]))
