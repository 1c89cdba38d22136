"""What the tests run in a process of its own: `python child.py JOB FOLDER`. The last line printed is JSON.

vLLM reads its settings from the environment as it is imported, binds threads and patches torch, so no test imports it.
"""

import importlib.util
import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

SMALL = {
    "max_model_len": 512,
    "enforce_eager": True,
    "seed": 0,
    "skip_tokenizer_init": True,
    "block_size": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 48,
}
OURS = {"config_format": "unified"}


def start(folder: str, **options: Any) -> Any:
    from vllm import LLM

    return LLM(folder, **(SMALL | options))


def prompts(count: int, longest: int, seed: int = 3) -> list[list[int]]:
    numbers = random.Random(seed)
    return [
        [numbers.randrange(512) for _ in range(numbers.randint(2, longest))] for _ in range(count)
    ]


def sample(llm: Any, given: list[list[int]], tokens: int, **options: Any) -> list[dict[str, Any]]:
    """The sampled tokens and their logprobs."""
    from vllm import SamplingParams

    fields = {"temperature": 0.7, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    params = SamplingParams(max_tokens=tokens, **(fields | options))
    outs = llm.generate([{"prompt_token_ids": p} for p in given], params, use_tqdm=False)
    return [
        {
            "prompt": list(p),
            "ids": list(o.outputs[0].token_ids),
            "cached": o.num_cached_tokens or 0,
            "logprobs": [
                row[token].logprob
                for row, token in zip(o.outputs[0].logprobs, o.outputs[0].token_ids, strict=True)
            ],
            "prompt_logprobs": [
                row[token].logprob for row, token in zip(o.prompt_logprobs[1:], p[1:], strict=True)
            ]
            if o.prompt_logprobs
            else [],
        }
        for p, o in zip(given, outs, strict=True)
    ]


def ours(folder: str) -> Any:
    """Sampled at T = 0.7, with the logprobs of the prompts, which vLLM gives at T = 1."""
    llm = start(folder, **OURS, enable_prefix_caching=False)
    found = {"runner": runner(llm), "outs": sample(llm, prompts(8, 90), 12, prompt_logprobs=0)}
    if found["runner"] is not None:
        found["groups"] = llm.apply_model(groups)[0]
    return found


def together(folder: str) -> Any:
    """Equal prompts longer than a page, and longer ones with the same beginning, all in one step."""
    llm = start(folder, **OURS, enable_prefix_caching=True, max_num_batched_tokens=256)
    numbers = random.Random(5)
    whole = [numbers.randrange(512) for _ in range(53)]
    given = [whole[:20]] * 4 + [whole[:37], whole, whole[:53]]
    return {"outs": sample(llm, given, 5), "runner": runner(llm)}


def groups(model: Any) -> list[dict[str, int]]:
    """The blocks that vLLM made of the model's pages."""
    return [{**vars(group), "lost": group.lost} for group in model.groups]


def runner(llm: Any) -> str | None:
    """The module of vLLM's model runner; a function does not reach another process."""
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] != "0":
        return None
    found: list[str] = llm.collective_rpc(lambda worker: type(worker.model_runner).__module__)
    return found[0]


def v2_runner(folder: str) -> Any:
    """As `ours`, by the V2 runner through Triton's interpreter."""
    file = Path(__file__).with_name("interpreter.py")
    spec = importlib.util.spec_from_file_location("interpreter", file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.install()
    llm = start(folder, **OURS)
    return {"runner": runner(llm), "outs": sample(llm, prompts(8, 40), 26)}


def both_classes(folder: str) -> Any:
    """Prompt logprobs in float32 by vLLM's own class, then by ours; both in one process."""
    given = prompts(16, 60)
    own = start(folder, dtype="float32", block_size=32, enable_prefix_caching=False)
    kind = own.apply_model(lambda model: type(model).__module__)
    theirs = sample(own, given, 1, prompt_logprobs=0)
    del own
    llm = start(
        folder, **OURS, additional_config={"numerics": "float32"}, enable_prefix_caching=False
    )
    mine = sample(llm, given, 1, prompt_logprobs=0)
    again = start(folder, dtype="float32", block_size=32, enable_prefix_caching=False)
    kinds = [
        kind[0],
        llm.apply_model(lambda model: type(model).__module__)[0],
        again.apply_model(lambda model: type(model).__module__)[0],
    ]
    return {"kinds": kinds, "theirs": theirs, "ours": mine}


def refused_settings(folder: str) -> Any:
    """What each setting that is not exact is answered with."""
    told = {}
    for name, options in {
        "tensor_parallel_size": {"tensor_parallel_size": 2},
        "data_parallel_size": {"data_parallel_size": 2},
        "routes": {"enable_return_routed_experts": True},
        "speculative": {
            "speculative_config": {
                "method": "ngram",
                "num_speculative_tokens": 2,
                "prompt_lookup_max": 2,
            }
        },
        "lora": {"enable_lora": True},
        "logprobs_mode": {"logprobs_mode": "raw_logits"},
        "logits_processors": {"logits_processors": ["a.b:C"]},
        "numerics": {"additional_config": {"numerics": "float16"}},
        "block_size": {"block_size": 48},
        "compile": {"compilation_config": {"mode": 3}},
        "graphs": {"compilation_config": {"cudagraph_mode": "PIECEWISE"}},
        "dummy": {"load_format": "dummy"},
    }.items():
        try:
            start(folder, **OURS, **options)
            told[name] = "accepted"
        except (ValueError, RuntimeError) as error:
            told[name] = f"{type(error).__name__}: {error}"
    return told


def foreign(folder: str) -> Any:
    """What config.json files that are not ours are answered with."""
    told = {}
    path = Path(folder, "config.json")
    raw = json.loads(path.read_text())
    for name, change in {
        "nonsense": {"model_type": "nonsense"},
        "unknown key": {"hiden_size": 1},
        "no model_type": {"model_type": None},
    }.items():
        path.write_text(json.dumps({k: v for k, v in (raw | change).items() if v is not None}))
        try:
            start(folder, **OURS)
            told[name] = "accepted"
        except ValueError as error:
            told[name] = str(error)
    path.write_text(json.dumps(raw))
    return told


def refused_requests(folder: str) -> Any:
    """What each sampling option that changes the distribution is answered with, and what runs beside them."""
    from vllm.exceptions import VLLMValidationError

    llm = start(folder, **OURS)
    told = {}
    for options in (
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"presence_penalty": 0.5},
        {"repetition_penalty": 1.1},
        {"logit_bias": {3: 1.0}},
        {"seed": 1},
        {"min_tokens": 2},
    ):
        (name,) = options
        try:
            sample(llm, [[1, 2, 3]], 2, **options)
            told[name] = "accepted"
        except VLLMValidationError as error:
            told[name] = str(error)
    return {"told": told, "greedy": sample(llm, [[1, 2, 3]], 4, temperature=0.0)}


def reload(folder: str) -> Any:
    """The same requests under the weights of the folder, of another checkpoint, and of the folder again, each loaded by
    vLLM's own reload; where every tensor lies before and after."""
    other = f"{folder}-other"
    llm = start(folder, **OURS)
    given = prompts(6, 60)
    found: dict[str, Any] = {"outs": [], "pointers": []}
    for path in (None, other, folder):
        if path is not None:
            llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
            llm.reset_prefix_cache()
        found["outs"].append(sample(llm, given, 8))
        found["pointers"].append(llm.apply_model(pointers)[0])
    return found


def pointers(model: Any) -> dict[str, int]:
    """Where every tensor that the forward reads lies."""
    return {name: t.data_ptr() for name, t in model.model.named_buffers()}


def stale(folder: str) -> Any:
    """The same prompt after a reload whose caller forgot the prefix cache."""
    llm = start(folder, **OURS)
    given = prompts(1, 60, seed=4)
    before = sample(llm, given, 1)
    llm.collective_rpc("reload_weights", kwargs={"weights_path": folder})
    try:
        sample(llm, given, 1)
        told = "accepted"
    except (RuntimeError, FloatingPointError) as error:
        told = str(error)
    return {"before": before, "told": told}


LENGTHS = (1, 2, 15, 16, 17, 127, 128, 129, 200, 255, 256, 384, 510, 511)


def lengths(folder: str) -> Any:
    """One token after prompts of awkward lengths, twice in one engine without a prefix cache, and what is said to a
    prompt that leaves no room."""
    from vllm.exceptions import VLLMValidationError

    llm = start(folder, **OURS, enable_prefix_caching=False)
    numbers = random.Random(5)
    given = [[numbers.randrange(512) for _ in range(n)] for n in LENGTHS]
    outs = [sample(llm, given, 1, prompt_logprobs=0) for _ in range(2)]
    try:
        sample(llm, [list(range(512))], 1)
        told = "accepted"
    except VLLMValidationError as error:
        told = str(error)
    return {"outs": outs, "told": told}


def listed(worker: Any) -> dict[str, Any]:
    """Whether vLLM's batch keeps lists of sampled tokens for logits processors, and what they are told of them."""
    worker = getattr(worker, "worker", worker)
    batch = worker.model_runner.input_batch
    kinds = [type(each).__name__ for each in batch.logitsprocs.all]
    return {
        "workers": [f"{each.__module__}.{each.__name__}" for each in type(worker).__mro__],
        "asked": batch.logitsprocs_need_output_token_ids,
        "told": len(batch.sampling_metadata.output_token_ids),
        "checks": kinds.count("Checks"),
        "groups": len(batch.block_table.block_tables),
    }


def workers(folder: str) -> Any:
    """Half way through three requests: what our worker keeps, with an extension of a caller's as verl has it, and what
    a worker that the caller named keeps; and that requests are still asked."""
    sys.path.insert(0, str(Path(__file__).parent))
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    found: dict[str, Any] = {}
    for name, options in {
        "ours": {},
        "extended": {"worker_extension_cls": "child.Extension"},
        "theirs": {"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"},
    }.items():
        llm = start(folder, **OURS, **options)
        params = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True, detokenize=False)
        for i, prompt in enumerate(prompts(3, 9)):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
        for _ in range(4):
            llm.llm_engine.step()
        (found[name],) = llm.collective_rpc(listed)
        if name == "extended":
            found[name]["extension"] = llm.collective_rpc("more")[0]
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
        found[name]["outs"] = sample(llm, prompts(3, 40), 8)
        try:
            sample(llm, [[1, 2, 3]], 2, top_p=0.9)
            found[name]["refused"] = "accepted"
        except (ValueError, VLLMValidationError) as error:  # 0.26 gives our own
            found[name]["refused"] = str(error)
        del llm  # its end is the end of this process's groups of ranks
    return found


class Extension:
    """What a trainer adds to every worker."""

    def more(self) -> str:
        return f"of {type(self).__name__}"


JOBS: dict[str, Callable[[str], Any]] = {
    job.__name__: job
    for job in (
        ours,
        v2_runner,
        both_classes,
        together,
        refused_settings,
        refused_requests,
        foreign,
        reload,
        stale,
        lengths,
        workers,
    )
}

if __name__ == "__main__":
    name, folder = sys.argv[1:3]
    print(json.dumps(JOBS[name](folder)))
