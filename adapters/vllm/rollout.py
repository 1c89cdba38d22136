"""`unified-models rl` with engine = "vllm": the recipe, sampling from real vLLM.

Run as a process of its own: vLLM reads its settings from the environment. Draws come from vLLM's one generator, so a
resumed run goes on exactly in everything but what it samples.
"""

import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from torch import Tensor

from unified_models.adapters.fsdp.recipe import training
from unified_models.adapters.vllm.plugin import CONFIG_FORMAT, found, unknown
from unified_models.adapters.vllm.verify import ENVIRONMENT
from unified_models.arguments import assignments
from unified_models.engine import Output, Sampling
from unified_models.rl.command import follow
from unified_models.rl.config import Config, read_config
from unified_models.rl.recipe import load_start, start_folder
from unified_models.rl.storage import Storage

CACHE_BYTES = 256 << 20


class VllmRollout:
    """`rl.rollout.Rollout` over a vLLM `LLM` in this process, which reads `folder`."""

    def __init__(self, folder: Path, config: Config) -> None:
        from vllm import LLM

        self.version, self.prefix_hits = 0, 0
        self.llm = LLM(
            str(folder),
            config_format=CONFIG_FORMAT,
            additional_config={"numerics": config.model.numerics},
            max_model_len=512,
            seed=config.seed,
            skip_tokenizer_init=True,
            block_size=config.rollout.page_tokens,
            kv_cache_memory_bytes=CACHE_BYTES,
            max_num_seqs=config.rollout.max_sequences,
            max_num_batched_tokens=config.rollout.step_tokens,
            weight_transfer_config={"backend": CONFIG_FORMAT},
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling]
    ) -> Sequence[Output]:
        """See Rollout. The samplings' seeds are left out."""
        given = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outs = self.llm.generate(given, [asked(s) for s in samplings], use_tqdm=False)
        self.prefix_hits += sum(out.num_cached_tokens or 0 for out in outs)
        return [self._output(out.outputs[0]) for out in outs]

    def _output(self, told: Any) -> Output:
        ids = list(told.token_ids)
        values = [row[token].logprob for row, token in zip(told.logprobs, ids, strict=True)]
        spans = getattr(told, "weight_versions", None)  # 0.26 tells none
        versions = [self.version] * len(ids)
        for span in spans or ():
            number = 0 if span.version == "default" else int(span.version)
            versions[span.start : span.end] = [number] * (span.end - span.start)
        return Output(ids, torch.tensor(values, dtype=torch.float32), versions, told.finish_reason)

    def update(self, named_tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See Rollout."""
        from unified_models.adapters.vllm.transfer import update_weights

        update_weights(self.llm, named_tensors, version)
        self.version = version


def asked(sampling: Sampling) -> Any:
    """vLLM's form of a sampling."""
    from vllm import SamplingParams

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        stop_token_ids=list(sampling.stop_ids),
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )


def main(arguments: Sequence[str]) -> int:
    """CONFIG [KEY=VALUE ...]: what the command line hands on. 1: a check failed; 2: the input is wrong."""
    file, *changes = arguments
    if reason := unknown(found()):
        raise SystemExit(reason)
    try:
        config = read_config(file, assignments(changes))
        folder = Storage(config.out, config).folder
        load_start(config, folder)  # refused here; made, where it is a tiny one
        rollout = VllmRollout(start_folder(config, folder), config)
        with training(config, folder) as trainer:
            passed = follow(config, Console(), rollout, trainer)
    except (ValueError, OSError) as error:
        Console(stderr=True, soft_wrap=True).print(Text(str(error), style="red"))
        return 2
    return 0 if passed else 1


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.exit(main(sys.argv[1:]))
