"""Whole jobs for an engine: with room for all requests, with little memory, and with prompts that begin alike."""

from dataclasses import dataclass, field
from typing import Any

from unified_models.bench.cases import PROMPT, Size, make_prompts
from unified_models.bench.clock import seconds_of
from unified_models.context.slots import State
from unified_models.engine import Engine, Output, Sampling, Stats
from unified_models.model import LanguageModel
from unified_models.training import logprobs
from unified_models.verify.compare import Comparison, bits


@dataclass(frozen=True)
class Ran:
    """One run of a job by a fresh engine."""

    seconds: float
    stats: Stats
    outs: list[Output]

    @property
    def overhead(self) -> float:
        """The share of the time that went neither into Model.forward nor into logits and logprobs."""
        return 1 - (self.stats.seconds_forward + self.stats.seconds_logprob) / self.seconds


@dataclass(frozen=True)
class Job:
    """Prompts to sample `tokens` tokens onto. options: of the engine; before: a prompt that it has run already."""

    name: str
    prompts: list[list[int]]
    tokens: int
    options: dict[str, Any] = field(default_factory=dict)
    before: list[int] | None = None

    def run(self, model: LanguageModel, seed: int) -> Ran:
        """By a fresh engine."""
        engine, outs = Engine(model, **self.options), list[Output]()
        if self.before:
            engine.generate([self.before], Sampling(1))
        sampling = Sampling(self.tokens, seed=seed)
        seconds = seconds_of(lambda: outs.extend(engine.generate(self.prompts, sampling)))
        return Ran(seconds, engine.stats, outs)

    def check(self, model: LanguageModel, seed: int) -> Comparison:
        """Run it, and compare every sampled token's logprob with the training forward."""
        outs = self.run(model, seed).outs
        sequences = [[*p, *out.ids] for p, out in zip(self.prompts, outs, strict=True)]
        trained = [lp.detach() for lp in logprobs(model, sequences)]
        again = [lp[len(p) - 1 :] for lp, p in zip(trained, self.prompts, strict=True)]
        return bits([out.logprobs for out in outs], again)


def whole_job(model: LanguageModel, size: Size, seed: int) -> Job:
    """The job whose overhead is reported."""
    prompts = make_prompts(model, size.requests, PROMPT, seed)
    return Job(f"{size.requests} x {size.tokens} tokens", prompts, size.tokens)


def memory_jobs(model: LanguageModel, size: Size, seed: int) -> list[Job]:
    """With and without the prefix cache: prompts that begin alike, and too little memory for what they grow to; for
    models with a scan, too few places for states.

    Half of the sampled tokens lie beyond `length`, where a page of every kind is full: all requests are let in within
    two steps, and some must give way.
    """
    few = max(2, size.requests // 2)
    before, *alike = make_prompts(model, few + 1, size.length + PROMPT, seed, shared=size.length)
    tokens = max(PROMPT, size.tokens // 4)
    prompts = make_prompts(model, few, max(1, size.length - tokens // 2), seed)
    little = few * size.length
    tight = {"cache_tokens": little, "step_tokens": little // 2}
    jobs = []
    for cache, name in ((True, "cache"), (False, "no cache")):
        options = {"prefix_cache": cache}
        jobs += [
            Job(f"shared prefix, {name}", alike, PROMPT, options, before),
            Job(f"little memory, {name}", prompts, tokens, options | tight),
        ]
    if any(isinstance(slot, State) for slot in model.slots().values()):
        jobs.append(Job("few states", prompts, tokens, {"state_slots": few // 2}))
    return jobs
