"""`unified-models verify DIR --against vllm`: real vLLM under load, and each logprob that it reported computed again.

Many concurrent requests, prompts in chunks, too little memory for all of them, shared beginnings, and two updates of
the weights while requests run. Each token is compared with the training forward and with the embedded engine, under
the weights that sampled it. Run as a process of its own: vLLM reads its settings from the environment.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import unified_models as um
from unified_models.adapters.vllm.plugin import CONFIG_FORMAT, found, unknown
from unified_models.model import LanguageModel
from unified_models.verify.compare import Comparison, bits

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # its sums of log_softmax are not torch's
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # compiles at first use, and is for top-p and top-k, which are refused
}
VERSIONS = 3


@dataclass(frozen=True)
class Load:
    """What is run. tokens: sampled by each request. budget: tokens of a step. share: requests whose whole length fits
    the memory at a time."""

    requests: int = 144
    tokens: int = 36
    concurrent: int = 16
    budget: int = 16
    share: int = 3
    temperature: float = 0.7
    seed: int = 0

    @property
    def least(self) -> int:
        """Tokens to compare."""
        return self.requests * self.tokens


@dataclass(frozen=True)
class Out:
    """What vLLM made of one request. ends: how many tokens it had when the weights of each version were replaced."""

    told: Any
    ends: Sequence[int]
    cached: int

    def span(self, version: int) -> range:
        """The tokens that were sampled under one version."""
        return range(self.ends[version - 1] if version else 0, self.ends[version])

    def versions_agree(self) -> bool:
        """Whether vLLM counts them so, too; 0.26 does not tell. It calls the weights that it loaded "default"."""
        told = getattr(self.told, "weight_versions", None)
        spans = {str(v) if v else "default": self.span(v) for v in range(len(self.ends))}
        wanted = {name: (span.start, span.stop) for name, span in spans.items() if span}
        return told is None or {s.version: (s.start, s.end) for s in told} == wanted

    def logprobs(self, span: range) -> Tensor:
        """Those that vLLM gave to these tokens, float32."""
        values = [self.told.logprobs[i][self.told.token_ids[i]].logprob for i in span]
        return torch.tensor(values, dtype=torch.float32)


@dataclass
class Report:
    """trained, served: of the tokens of each version, against the training forward and the embedded engine.

    preemptions: for want of memory. cached: prompt tokens that were not run, because their rows were in memory.
    """

    folder: str
    release: str
    trained: list[Comparison] = field(default_factory=list)
    served: list[Comparison] = field(default_factory=list)
    steps: int = 0
    preemptions: int = 0
    cached: int = 0
    least: int = 0
    mistold: int = 0

    def problems(self) -> list[str]:
        """Everything that fails, and everything that did not happen though it must."""
        compared = sum(c.compared for c in self.trained)
        wrong = [
            f"version {v} against {what}: {c}"
            for what, each in (("training", self.trained), ("the engine", self.served))
            for v, c in enumerate(each)
            if c.unequal or c.compared < self.least // 10
        ]
        if compared < self.least:
            wrong.append(f"{compared} tokens compared, {self.least} wanted")
        if self.mistold:
            wrong.append(f"{self.mistold} requests whose weight versions vLLM counts otherwise")
        for name in ("preemptions", "cached"):
            if not getattr(self, name):
                wrong.append(f"no {name}")
        return wrong

    @property
    def ok(self) -> bool:
        return not self.problems()

    def table(self) -> Table:
        """One row a version of the weights."""
        table = Table("weights", "tokens", "unequal to training", "unequal to the engine")
        for v, (a, b) in enumerate(zip(self.trained, self.served, strict=True)):
            table.add_row(f"version {v}", str(a.compared), str(a.unequal), str(b.unequal))
        table.title = (
            f"vLLM {self.release}, {self.folder}: {self.steps} steps, {self.preemptions} preemptions, "
            f"{self.cached} prompt tokens from memory"
        )
        return table

    def to_json(self) -> str:
        """For machines."""
        return json.dumps({"ok": self.ok, "problems": self.problems()} | asdict(self), indent=1)


def run(folder: Path, load: Load, numerics: str = "deployed") -> Report:
    """Everything, in this process; `ENVIRONMENT` must have been set before vLLM was imported."""
    from vllm.platforms import current_platform

    report = Report(str(folder), found() or "", least=load.least)
    models = versions(folder, load, numerics, current_platform.device_type)
    prompts = make_prompts(models[0].config.vocab_size, load)
    outs = rollout(folder, models, prompts, load, numerics, report)
    compare(models, prompts, outs, load, report)
    return report


def versions(folder: Path, load: Load, numerics: str, device: str = "cpu") -> list[LanguageModel]:
    """The checkpoint, and what a trainer might make of it."""
    models = [
        um.load(folder, device=device, numerics=numerics, progress=False) for _ in range(VERSIONS)
    ]
    with torch.no_grad():
        for v, model in enumerate(models):
            generator = torch.Generator().manual_seed(load.seed + v)
            for _, weight in model.weights():
                if v and weight.master is not None and not weight.frozen:
                    noise = torch.randn(weight.master.shape, generator=generator)
                    weight.master.mul_(1 + 0.02 * noise.to(device))
            model.commit()
    return models


def make_prompts(vocab_size: int, load: Load) -> list[list[int]]:
    """Random ids, from one token to a few pages; one in six begins like the others of its kind."""
    random = Random(load.seed)
    head = [random.randrange(vocab_size) for _ in range(150)]
    prompts = []
    for i in range(load.requests):
        tail = [random.randrange(vocab_size) for _ in range(random.randint(1, 70))]
        prompts.append(head[: random.choice((130, 150))] + tail[:9] if i % 6 == 0 else tail)
    return prompts


def make_llm(folder: Path, model: LanguageModel, load: Load, numerics: str) -> Any:
    """vLLM with little memory."""
    from vllm import LLM

    from unified_models.adapters.vllm.caches import pages

    longest = 150 + 9 + load.tokens + 1
    needed = pages(model.slots().values(), 16, longest, load.budget)
    return LLM(
        str(folder),
        config_format=CONFIG_FORMAT,
        additional_config={"numerics": numerics},
        max_model_len=512,
        seed=load.seed,
        skip_tokenizer_init=True,
        block_size=16,
        kv_cache_memory_bytes=256 << 20,
        gpu_memory_utilization=0.2,  # of what is asked for, beside other processes
        num_gpu_blocks_override=max(load.share, 1) * needed + 1,
        max_num_seqs=load.concurrent,
        max_num_batched_tokens=load.budget,
        enable_prefix_caching=True,
        enforce_eager=True,  # where there are graphs, a scan's prefix cache would be switched off
        disable_log_stats=False,
        weight_transfer_config={"backend": CONFIG_FORMAT},
    )


def rollout(
    folder: Path,
    models: Sequence[LanguageModel],
    prompts: Sequence[Sequence[int]],
    load: Load,
    numerics: str,
    report: Report,
) -> list[Out]:
    """The outputs, in the order of the prompts; the weights are replaced after a third and two thirds of the tokens."""
    from vllm import SamplingParams

    from unified_models.adapters.vllm.transfer import update_weights

    llm = make_llm(folder, models[0], load, numerics)
    engine = llm.llm_engine
    params = SamplingParams(
        max_tokens=load.tokens,
        temperature=load.temperature,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
    )
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, params)
    outs: dict[int, Out] = {}
    ends = [[0] * VERSIONS for _ in prompts]
    version, given_way = 0, 0
    while engine.has_unfinished_requests():
        for out in engine.step():
            i = int(out.request_id)
            ends[i][version:] = [len(out.outputs[0].token_ids)] * (VERSIONS - version)
            if out.finished:
                outs[i] = Out(out.outputs[0], ends[i], out.num_cached_tokens or 0)
        report.steps += 1
        if version + 1 < VERSIONS and len(outs) * VERSIONS >= (version + 1) * len(prompts):
            version += 1
            given_way += len(engine.engine_core.engine_core.scheduler.running)
            update_weights(llm, um.named_tensors(models[version]), version, models[version])
    counts = {m.name: m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions"}
    report.preemptions = int(sum(counts.values())) - given_way
    report.cached = sum(out.cached for out in outs.values())
    return [outs[i] for i in range(len(prompts))]


@torch.no_grad()
def compare(
    models: Sequence[LanguageModel],
    prompts: Sequence[Sequence[int]],
    outs: Sequence[Out],
    load: Load,
    report: Report,
) -> None:
    """Each token under its own version: whole sequences are computed again, its stretch is looked at."""
    whole = [[*p, *out.told.token_ids] for p, out in zip(prompts, outs, strict=True)]
    report.mistold = sum(not out.versions_agree() for out in outs)
    for version, model in enumerate(models):
        spans = [out.span(version) for out in outs]
        kept = [i for i, span in enumerate(spans) if len(span)]
        sequences = [whole[i] for i in kept]
        engine = um.Engine(model, cache_tokens=16 * 512, step_tokens=256)
        sides = (
            um.logprobs(model, sequences, load.temperature),
            engine.score(sequences, load.temperature),
        )
        told = [outs[i].logprobs(spans[i]) for i in kept]
        for side, rows in zip(sides, (report.trained, report.served), strict=True):
            first = [len(prompts[i]) - 1 + spans[i].start for i in kept]
            parts = [lp[f : f + len(t)] for lp, f, t in zip(side, first, told, strict=True)]
            rows.append(bits(told, [part.cpu() for part in parts]))


def main(arguments: Sequence[str]) -> int:
    """DIR NUMERICS SEED [JSON]: what the command line hands on."""
    folder, numerics, seed, *json_file = arguments
    if reason := unknown(found()):
        raise SystemExit(reason)
    report = run(Path(folder), Load(seed=int(seed)), numerics)
    console = Console()
    console.print(report.table())
    for problem in report.problems():
        console.print(problem, style="red")
    if json_file:
        Path(json_file[0]).write_text(report.to_json())
    return 0 if report.ok else 1


if __name__ == "__main__":
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.exit(main(sys.argv[1:]))
