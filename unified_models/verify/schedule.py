"""Kinds of schedules: ways to run the same sequences, each with random numbers of its own.

A kind is a function of a `Material`, a `Watch` and a `Random`, and yields what was scored. The same arguments run the
same schedule.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import torch
from torch import Tensor

from unified_models.checkpoint import named_tensors
from unified_models.context.local import LocalContext
from unified_models.engine import Engine, Sampling
from unified_models.model import LanguageModel
from unified_models.training import logprobs
from unified_models.verify.counters import chunks
from unified_models.verify.drive import Cut, drive
from unified_models.verify.ties import TiesContext
from unified_models.verify.watch import Watch

BUDGETS = (1, 16, 64, 1000)  # tokens of a step
# Tokens of a sequence that runs at a budget of 1 each turn; of the longer ones, one does.
SHORT = 65
SCORED = 129  # tokens of the longest sequence that is scored while others are sampled after
STREAM = 900  # tokens of a long sequence
STREAM_BUDGETS = (
    1000,
    100,
    1,
)  # tokens of a step; the last one takes a step a token, and runs in every other turn
TEMPERATURE = 0.7  # of sampled tokens
SAMPLED = 8  # tokens
COPIES = (1, 17, 64)  # of one sequence side by side: that many rows for each of its experts


@dataclass(frozen=True)
class Material:
    """What is run: a sequence of each length. turn: counts the tables of a run; kinds that do a part of everything
    take another part each turn."""

    sequences: Sequence[Sequence[int]]
    seed: int
    turn: int

    @property
    def longest(self) -> int:
        return max(map(len, self.sequences))

    @property
    def all(self) -> range:
        return range(len(self.sequences))

    def of(self, numbers: Sequence[int]) -> list[Sequence[int]]:
        """Sequences by number."""
        return [self.sequences[i] for i in numbers]


@dataclass(frozen=True)
class Scored:
    """Logprobs that a run gave to the tokens of a sequence from `start` on.

    number: of the sequence or of its prompt, which is the row of the table.
    """

    number: int
    sequence: Sequence[int]
    start: int
    logprobs: Tensor
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if len(self.logprobs) != self.expected:
            raise ValueError(
                f"sequence {self.number}: {self.expected} tokens from token {self.start} on, "
                f"and {len(self.logprobs)} logprobs"
            )

    @property
    def expected(self) -> int:
        return max(len(self.sequence) - self.start, 0)


def _scored(
    material: Material, numbers: Sequence[int], values: Sequence[Tensor]
) -> Iterator[Scored]:
    for i, value in zip(numbers, values, strict=True):
        yield Scored(i, material.sequences[i], 1, value)


def alone(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """Each sequence by itself, in one step."""
    options = {
        "step_tokens": material.longest,
        "cache_tokens": material.longest,
        "max_sequences": 1,
    }
    engine = watch.engine(material.all, prefix_cache=False, **options)
    for i in material.all:
        yield from _scored(material, [i], engine.score([material.sequences[i]]))


def batched(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """Many sequences in a step, in their order."""
    options = {"step_tokens": random.randrange(100, 400), "max_sequences": random.randrange(4, 17)}
    engine = watch.engine(material.all, cache_tokens=4 * material.longest, **options)
    yield from _scored(material, material.all, engine.score(material.sequences))


def reordered(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """As batched, shuffled, in steps and on pages of another size; few find a place for a scan's state at a time."""
    order = random.sample(material.all, len(material.all))
    options = {
        "step_tokens": random.randrange(100, 400),
        "page_tokens": random.choice(watch.pages),
        "state_slots": random.randrange(2, 5),
    }
    engine = watch.engine(order, cache_tokens=4 * material.longest, prefix_cache=False, **options)
    yield from _scored(material, order, engine.score(material.of(order)))


def chunked(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """Budgets of 1, 16, 64 and 1000 tokens a step: every sequence at each of them, but of the long ones, which take a
    step a token at a budget of 1, another one each turn."""
    long = [i for i in material.all if len(material.sequences[i]) > SHORT]
    single = [i for i in material.all if i not in long]
    single += [long[material.turn % len(long)]] if long else []
    for budget in BUDGETS:
        numbers = single if budget == 1 else material.all
        engine = watch.engine(
            numbers, step_tokens=budget, cache_tokens=4 * material.longest, prefix_cache=False
        )
        yield from _scored(material, numbers, engine.score(material.of(numbers)))


def random_cuts(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """Every sequence is cut by itself, at random places, some of them into single tokens."""

    def cut(_: int, left: int) -> int:
        return random.choice((0, 1, random.randint(1, 20), random.randint(16, 80), left))

    yield from _driven(material, watch, material.all, cut)


def one_token(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """Decoding of given tokens: every sequence from its first token to its last, one in a step, side by side. Then
    copies of one sequence."""
    yield from _driven(material, watch, material.all, lambda *_: 1)
    short = [i for i in material.all if len(material.sequences[i]) > 3][:1]
    for copies in COPIES:
        yield from _driven(material, watch, short * copies, lambda *_: 1)


def _driven(material: Material, watch: Watch, numbers: Sequence[int], cut: Cut) -> Iterator[Scored]:
    yield from _scored(material, numbers, drive(watch, numbers, material.of(numbers), cut))


def sampled(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """The engine samples after each sequence; what it reports about its own tokens is compared. Underway all weights
    are replaced, by equal ones: what runs then is run again."""
    prompts = _prompts(material)
    options = {"step_tokens": random.randrange(100, 300), "max_sequences": random.randrange(8, 24)}
    engine = watch.engine(prompts, cache_tokens=12 * material.longest, **options)
    sampling = _sampling(material, SAMPLED)
    requests = [engine.submit(material.sequences[i], sampling, n) for n, i in enumerate(prompts)]
    for _ in range(random.randrange(2, 5)):
        engine.step()
    watch.counters.preemptions -= len(engine.running)  # these do not give way for want of memory
    engine.update_weights(named_tensors(watch.model))
    engine.run()
    for i, request in zip(prompts, requests, strict=True):
        yield _own(material, i, request.sampled, request.output().logprobs)
    yield from _unprompted(material)


def prefix_cached(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """As sampled, twice in one engine: the second time most of a prompt is found in memory. With a scan once more, each
    prompt right after itself, in an engine that keeps few states."""
    prompts = _prompts(material)
    options = {
        "step_tokens": random.randrange(64, 300),
        "cache_tokens": 12 * material.longest,
        "poison": True,
    }
    engine = watch.engine([*prompts, *prompts], **options)
    yield from _generated(material, engine, prompts, SAMPLED // 4)
    yield from _generated(material, engine, prompts, SAMPLED // 2)
    if watch.chunks:
        twice = [i for i in random.sample(prompts, len(prompts)) for _ in range(2)]
        engine = watch.engine(twice, state_slots=1, **options)
        yield from _generated(material, engine, twice, SAMPLED // 4)
    yield from _unprompted(material)


def preempted(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """Sampling and scoring in a memory that prompts which end with a page, or just below, fill: they go first, the
    shortest last, and then grow into pages that are not there, which the shortest give up."""
    prompts, tokens, page = _prompts(material), SAMPLED // 2, watch.page
    order = random.sample(prompts, len(prompts))
    full = [i for i in order if -len(material.sequences[i]) % page < tokens]
    full.sort(key=lambda i: -len(material.sequences[i]))
    order = [*full, *(i for i in order if i not in full)]
    room = sum(-(-len(material.sequences[i]) // page) * page for i in full)
    room = max(room, material.longest + tokens)
    scores = [
        i
        for i in prompts
        if 1 < len(material.sequences[i]) <= SCORED and i % 3 == material.turn % 3
    ]
    engine = watch.engine([*order, *scores], cache_tokens=room, step_tokens=room, poison=True)
    sampling = _sampling(material, tokens)
    requests = [
        engine.submit(material.sequences[i], sampling, stream=prompts.index(i)) for i in order
    ]
    scoring = [engine.submit_score(material.sequences[i]) for i in scores]
    engine.run()
    for i, request in zip(order, requests, strict=True):
        yield _own(material, i, request.sampled, request.output().logprobs)
    yield from _scored(material, scores, [request.output().logprobs for request in scoring])
    yield from _unprompted(material)


def _prompts(material: Material) -> list[int]:
    """Numbers of the sequences that something can be sampled after."""
    return [i for i in material.all if len(material.sequences[i])]


def _unprompted(material: Material) -> Iterator[Scored]:
    """The rest, of which an engine that samples has nothing to tell."""
    return (
        Scored(i, [], 0, torch.zeros(0)) for i in material.all if not len(material.sequences[i])
    )


def _sampling(material: Material, tokens: int) -> Sampling:
    """Every kind that samples draws the same tokens: stream n of one seed belongs to the n-th prompt."""
    return Sampling(max_tokens=tokens, temperature=TEMPERATURE, seed=material.seed)


def _own(material: Material, number: int, ids: Sequence[int], values: Tensor) -> Scored:
    prompt = material.sequences[number]
    return Scored(number, [*prompt, *ids], len(prompt), values, TEMPERATURE)


def _generated(
    material: Material, engine: Engine, numbers: Sequence[int], tokens: int
) -> Iterator[Scored]:
    prompts, sampling = _prompts(material), _sampling(material, tokens)
    requests = [
        engine.submit(material.sequences[i], sampling, stream=prompts.index(i)) for i in numbers
    ]
    engine.run()
    for i, request in zip(numbers, requests, strict=True):
        yield _own(material, i, request.sampled, request.output().logprobs)


def packed(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """The training forward, with its graph: random packs of two sequences and more, with and without recomputation,
    by 1, 7 and 256 rows of logits."""
    order = random.sample(material.all, len(material.all))
    ways = random.sample([*product((False, True), (1, 7, 256))], max(1, min(6, len(order) // 2)))
    for n, (recompute, rows) in enumerate(ways):
        numbers = order[n :: len(ways)]
        with torch.enable_grad():
            values = logprobs(
                watch.model,
                material.of(numbers),
                recompute=recompute,
                rows=rows,
                context=watch.pack(numbers),
            )
        yield from _scored(material, numbers, [value.detach() for value in values])


def streams(material: Material, watch: Watch, random: Random) -> Iterator[Scored]:
    """Long sequences, over many chunks of a scan: in one step, in steps of 100 tokens, and token by token."""
    budgets = STREAM_BUDGETS[: -1 if material.turn % 2 else None]
    for budget in budgets:
        engine = watch.engine(
            material.all,
            step_tokens=budget,
            cache_tokens=material.longest,
            max_sequences=1,
            prefix_cache=False,
        )
        yield from _scored(material, material.all, engine.score(material.sequences))


@dataclass(frozen=True)
class Kind:
    """A column of the table. base: the context class of the runs and of their reference. lengths: of sequences of its
    own, which it runs in place of the table's; where: the models that it is for."""

    name: str
    run: Callable[[Material, Watch, Random], Iterator[Scored]]
    base: Callable[..., Any] = LocalContext
    lengths: tuple[int, ...] = ()
    where: Callable[[LanguageModel], bool] = lambda _: True


KINDS = (
    Kind("alone", alone),
    Kind("batched", batched),
    Kind("reordered", reordered),
    Kind("chunked", chunked),
    Kind("random cuts", random_cuts),
    Kind("one token", one_token),
    Kind("sampled", sampled),
    Kind("prefix", prefix_cached),
    Kind("preempted", preempted),
    Kind("packed", packed),
    Kind("ties", random_cuts, TiesContext),
    Kind("streams", streams, lengths=(STREAM,), where=lambda model: bool(chunks(model))),
)
