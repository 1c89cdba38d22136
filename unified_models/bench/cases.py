"""What is timed: decode with one request and with many, prefill, and the training step."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unified_models.bench.clock import seconds_of
from unified_models.engine import Engine, Sampling
from unified_models.model import LanguageModel
from unified_models.training import logprobs

PROMPT = 8  # tokens, where prefill is not what is looked at


@dataclass(frozen=True)
class Size:
    """How much is run.

    repeats: rounds. requests: side by side, against one. steps: of decode on the clock. tokens: sampled by each
    request where the engine itself is looked at. packs, length: sequences of a prefill and of a training step, and
    the tokens of each.
    """

    repeats: int = 5
    requests: int = 16
    steps: int = 8
    tokens: int = 64
    packs: int = 8
    length: int = 128

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"{name} = {value}; at least 1")


def make_prompts(
    model: LanguageModel, count: int, length: int, seed: int, *, shared: int = 0
) -> list[list[int]]:
    """Random token ids; the first `shared` of them are the same in all prompts."""
    generator = torch.Generator().manual_seed(seed)
    vocab = model.config.vocab_size
    head = torch.randint(vocab, (shared,), generator=generator).tolist()
    tails = torch.randint(vocab, (count, length - shared), generator=generator)
    return [head + tail for tail in tails.tolist()]


@dataclass(frozen=True)
class Case:
    """work: does it once and returns the seconds that count. tokens: how many it takes."""

    name: str
    tokens: int
    work: Callable[[], float]


@dataclass(frozen=True)
class Cases:
    """The work of each case, on one model."""

    model: LanguageModel
    size: Size
    seed: int

    def decode_cases(self) -> list[Case]:
        """One request, and many."""
        size = self.size
        return [
            Case("decode, 1 request", size.steps, lambda: self.decode(1)),
            Case(
                f"decode, {size.requests} requests",
                size.requests * size.steps,
                lambda: self.decode(size.requests),
            ),
        ]

    def pack_cases(self) -> list[Case]:
        """The same sequences through the engine and through the training forward."""
        size = self.size
        pack = make_prompts(self.model, size.packs, size.length, self.seed)
        tokens = size.packs * size.length
        return [
            Case("prefill", tokens, lambda: self.prefill(pack)),
            Case("training, forward", tokens, lambda: self.forward(pack)),
            Case("training, forward and backward", tokens, lambda: self.backward(pack)),
        ]

    def decode(self, count: int) -> float:
        """`steps` steps in which each of `count` requests samples a token; their prefill is not on the clock."""
        engine, steps = Engine(self.model), self.size.steps
        sampling = Sampling(steps + count + 1, seed=self.seed)
        prompts = make_prompts(self.model, count, PROMPT, self.seed)
        requests = [engine.submit(prompt, sampling, i) for i, prompt in enumerate(prompts)]
        while not all(request.sampled for request in requests):
            engine.step()
        before = engine.stats.tokens_sampled
        seconds = seconds_of(lambda: [engine.step() for _ in range(steps)])
        sampled = engine.stats.tokens_sampled - before
        assert sampled == count * steps, f"{sampled} tokens in {steps} steps of {count} requests"
        return seconds

    def prefill(self, pack: list[list[int]]) -> float:
        """Logprobs by the engine, with nothing to find in memory."""
        tokens = sum(map(len, pack))
        engine = Engine(self.model, cache_tokens=tokens, step_tokens=min(tokens, 512))
        return seconds_of(lambda: engine.score(pack))

    @torch.no_grad()
    def forward(self, pack: list[list[int]]) -> float:
        """Logprobs by the training forward, in one pack."""
        return seconds_of(lambda: logprobs(self.model, pack))

    def backward(self, pack: list[list[int]]) -> float:
        """Logprobs and the gradients of their mean."""
        seconds = seconds_of(lambda: torch.cat(logprobs(self.model, pack)).mean().backward())
        self.model.zero_grad()
        return seconds
