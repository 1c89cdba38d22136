"""The engine: requests in, tokens and their exact logprobs out, weights replaced in between."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain, count
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from unified_models.checkpoint import update
from unified_models.context.interface import Context
from unified_models.context.local import LocalContext
from unified_models.context.memory import Memory, PackMemory
from unified_models.context.parallel import Parallel, ParallelContext
from unified_models.context.step import Step
from unified_models.engine.memory import PagedMemory
from unified_models.engine.readout import Readout
from unified_models.engine.request import Output, Request
from unified_models.engine.sampling import Sampling, check_temperature
from unified_models.engine.scheduler import Scheduler, Work
from unified_models.engine.stats import Stats
from unified_models.model import LanguageModel
from unified_models.progress import bar

ContextFactory = Callable[[Step, Memory], Context]


class Engine:
    """Runs one model for many requests at a time.

    Args:
        cache_tokens: tokens that all running sequences keep together; also the longest sequence there can be.
        step_tokens: tokens run in one step, over all sequences.
        max_sequences: sequences in one step.
        prefix_cache: reuse what is in memory of an earlier sequence with the same beginning. The hit is the longest
            multiple of page_tokens, short of the last token, for which everything that later tokens read is still
            there: all closed windows, and the rows within each sliding window.
        page_tokens: tokens of a page.
        state_slots: sequences whose scan states fit; no more run at a time, the others wait. What they leave unused
            keeps the states of prefixes. None: twice max_sequences. Only for models with a scan.
        poison: fill pages with NaN patterns when they change hands (a check; it costs time).
        context: what runs a step of the model.
        parallel: the processes that share the model's experts (`um.load(experts=)`). Each has an engine and requests
            of its own, and calls `generate`, `score` or `run` as often as the others: they step together.

    Results do not depend on any of these, bit for bit. A model may share its weights with a trainer in this process:
    a commit is then noticed before the next step and treated as an update.

    Raises:
        ValueError: a size that is no positive int, or a slot that this engine does not store.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache_tokens: int = 4096,
        step_tokens: int = 64,
        max_sequences: int = 16,
        prefix_cache: bool = True,
        *,
        page_tokens: int = 16,
        state_slots: int | None = None,
        poison: bool = False,
        context: ContextFactory = LocalContext,
        parallel: Parallel | None = None,
    ) -> None:
        sizes = {
            "cache_tokens": cache_tokens,
            "step_tokens": step_tokens,
            "max_sequences": max_sequences,
            "page_tokens": page_tokens,
            "state_slots": 2 * max_sequences if state_slots is None else state_slots,
        }
        for name, value in sizes.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{name} must be an int of at least 1, got {value!r}")
        if type(prefix_cache) is not bool:
            raise ValueError(f"prefix_cache must be True or False, got {prefix_cache!r}")
        self.model, self._context = model, context
        self._together = parallel.experts if parallel else None
        if parallel is not None:
            self._context = partial(ParallelContext, parallel=parallel)
        self._weights = [weight for _, weight in model.weights()]
        self._tables = [table for _, table in model.tables()]
        self._seen = self._fingerprint()
        self._device = next(chain(model.parameters(), model.buffers())).device
        self.stats = Stats(prefix_cache)
        self._memory = PagedMemory(
            model.slots().values(),
            cache_tokens=cache_tokens,
            page_tokens=page_tokens,
            seats=max_sequences,
            device=self._device,
            step_tokens=step_tokens,
            state_slots=sizes["state_slots"],
            poison=poison,
        )
        self._scheduler = Scheduler(self._memory, step_tokens, prefix_cache, self.stats)
        self._numbers = count()

    def __repr__(self) -> str:
        memory, scheduler = self._memory, self._scheduler
        return (
            f"Engine(cache_tokens={memory.cache_tokens}, step_tokens={scheduler.step_tokens}, "
            f"max_sequences={memory.seats}, prefix_cache={scheduler.prefix_cache}, "
            f"page_tokens={memory.page_tokens}, state_slots={memory.state_slots}, poison={memory.poison}, "
            f"cache_bytes={memory.num_bytes}, "
            f"weight_version={self.stats.weight_version})"
        )

    # whole jobs

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling] | None = None,
    ) -> list[Output]:
        """Sample onto each prompt; results in the order of the prompts.

        sampling: one for all prompts (prompt i then draws from its own stream of the seed), or a list with one a
        prompt. If this raises or is interrupted, its requests are aborted and their memory is free.

        Raises:
            ValueError: a prompt is empty, is no list of ints, has a token outside the vocabulary, or does not fit;
                or there are not as many samplings as prompts. Nothing has been run then.
        """
        prompts = list(prompts)
        if sampling is None or isinstance(sampling, Sampling):
            each = [sampling or Sampling()] * len(prompts)
            streams = list(range(len(prompts)))
        else:
            each, streams = list(sampling), [0] * len(prompts)
            if len(each) != len(prompts):
                raise ValueError(f"{len(each)} samplings for {len(prompts)} prompts")
        requests = [
            self._request(f"prompt {i}", prompt, s, s.reported_temperature, stream)
            for i, (prompt, s, stream) in enumerate(zip(prompts, each, streams, strict=True))
        ]
        self._finish("generating", requests)
        return [request.output() for request in requests]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Tensor]:
        """log_softmax(logits / temperature) of tokens 1, 2, .. of each sequence, by prefill; float32, empty for a
        sequence of 0 or 1 tokens. Raises ValueError as `generate` does."""
        check_temperature("score: temperature must be", temperature)
        requests = [
            self._request(f"sequence {i}", sequence, None, temperature, 0)
            for i, sequence in enumerate(sequences)
        ]
        self._finish("scoring", [request for request in requests if request.target > 0])
        return [torch.tensor(request.logprobs, dtype=torch.float32) for request in requests]

    def _finish(self, what: str, requests: list[Request]) -> None:
        try:
            for request in requests:
                self._scheduler.add(request)
            self.run(requests, what)
        finally:
            for request in requests:
                self.abort(request)

    # step by step

    @property
    def running(self) -> tuple[Request, ...]:
        """Requests with a seat, oldest first."""
        return tuple(self._scheduler.running)

    def submit(
        self, prompt: Sequence[int], sampling: Sampling | None = None, stream: int = 0
    ) -> Request:
        """Queue a prompt; `stream` tells requests of one seed apart. Raises ValueError as `generate` does."""
        sampling = sampling or Sampling()
        request = self._request("prompt", prompt, sampling, sampling.reported_temperature, stream)
        self._scheduler.add(request)
        return request

    def submit_score(self, sequence: Sequence[int], temperature: float = 1.0) -> Request:
        """Queue a sequence of at least two tokens to be scored. Raises ValueError as `generate` does."""
        check_temperature("score: temperature must be", temperature)
        request = self._request("sequence", sequence, None, temperature, 0)
        if request.target < 1:
            raise ValueError(f"a sequence of {len(sequence)} tokens has no token to score")
        self._scheduler.add(request)
        return request

    def run(self, requests: Iterable[Request] | None = None, what: str = "running") -> None:
        """Step until these requests are done (None: until the engine is idle)."""
        scheduler = self._scheduler
        waited = [*scheduler.running, *scheduler.waiting] if requests is None else list(requests)
        left = waited
        with bar(what, sum(request.size for request in waited)) as shown:
            while self._anyone(bool(left)):
                shown.show(lambda: sum(r.size if r.done else r.reached for r in waited))
                if not self.step():
                    left = []
                    self._idle()
                left = [request for request in left if not request.done]

    def _anyone(self, here: bool) -> bool:
        """Whether a process has work left, of those that step together."""
        if self._together is None:
            return here
        some = torch.tensor([here], dtype=torch.int32, device=self._device)
        dist.all_reduce(some, dist.ReduceOp.MAX, group=self._together)
        return bool(some)

    @torch.no_grad()
    def _idle(self) -> None:
        """Take part in a step of the others: one token of nobody's, which is remembered nowhere."""
        if self._together is not None:
            nobody = torch.zeros(1, dtype=torch.int64, device=self._device)
            self.model(nobody, self._context(Step.of([1], device=self._device), PackMemory()))

    def abort(self, request: Request) -> None:
        """Drop a request and free its memory; nothing happens if it is done."""
        if not request.done:
            request.reason = "aborted"
            self._scheduler.finish(request, "aborted")

    @torch.no_grad()
    def step(self) -> bool:
        """Run one step; False if there was nothing to do.

        Raises:
            FloatingPointError: a logprob is NaN. No token of this step was taken.
        """
        began = perf_counter()
        self._notice_commits()
        work = self._scheduler.plan()
        if not work:
            return False
        self.stats.peak_pages = max(self.stats.peak_pages, self._memory.used_pages)
        step = Step.of([i.end - i.start for i in work], [i.start for i in work], self._device)
        memory = self._memory.at(step, [i.request.seat for i in work])
        ids = [token for i in work for token in i.request.tokens[i.start : i.end]]
        ids_T = torch.tensor(ids, dtype=torch.int64, device=self._device)
        readout = Readout.of(work)
        entered = perf_counter()
        ctx = self._context(step, memory)
        hidden_TM = self.model(ids_T, ctx)
        left = perf_counter()
        tokens, logprobs, seconds = readout.read(
            hidden_TM, lambda rows: self.model.logits(rows, ctx), self.model.config.vocab_size
        )
        self._take(work, tokens, logprobs)
        self.stats.seconds_forward += left - entered
        self.stats.seconds_logprob += seconds
        self.stats.seconds_total += perf_counter() - began
        return True

    def _take(self, work: list[Work], tokens: list[int], logprobs: list[float]) -> None:
        """Everything that a step changes about its requests, once all of it is known."""
        stats, at, news = self.stats, 0, []
        for item in work:
            request, num = item.request, len(item.asked)
            values = logprobs[at : at + num]
            if any(value != value for value in values):
                raise FloatingPointError(
                    f"request {request.number}: the logprob after token {item.end - 1} or one before it in this "
                    f"step is NaN (weight version {stats.weight_version})"
                )
            news.append((request, tokens[at : at + num], values))
            at += num
        assert at == len(tokens) == len(logprobs), f"{at} rows asked for, {len(tokens)} read"
        self._scheduler.settle(work)
        stats.steps += 1
        stats.tokens += sum(item.end - item.start for item in work)
        follows = [
            item.request.sampling is not None and item.start >= item.request.num_given
            for item in work
        ]
        stats.mixed_steps += any(follows) and not all(follows)
        for request, sampled, values in news:
            if request.sampling is None:
                request.logprobs += values
                stats.tokens_scored += len(values)
                if len(request.logprobs) == request.target:
                    request.reason = "length"
            elif values:
                request.add(sampled[0], values[0], stats.weight_version)
                stats.tokens_sampled += 1
            if request.reason:
                self._scheduler.finish(request)

    # weights

    def update_weights(
        self, named_tensors: Iterable[tuple[str, Tensor]], version: int | None = None
    ) -> None:
        """Replace weights in place: checkpoint names, master dtypes; see `checkpoint.update`. Between steps.

        The prefix cache is dropped and running requests are preempted, so each is recomputed under the new weights
        before it samples again. version: of the new weights, default one more than now.

        Raises:
            ValueError: the version is not larger than the present one, or the tensors do not match. Nothing has
                changed then.
        """
        self._notice_commits()
        now = self.stats.weight_version
        version = now + 1 if version is None else version
        if type(version) is not int or version <= now:
            raise ValueError(
                f"version must be an int larger than the present {now}, got {version!r}"
            )
        update(self.model, named_tensors)
        self._adopt(version)

    def _notice_commits(self) -> None:
        """A commit by someone else who holds these weights is an update."""
        if self._fingerprint() != self._seen:
            self._adopt(self.stats.weight_version + 1)

    def _adopt(self, version: int) -> None:
        self._seen = self._fingerprint()
        self._scheduler.restart()
        self.stats.weight_version = version
        self.stats.updates += 1

    def _fingerprint(self) -> tuple[int, int]:
        """Grows with every commit of a weight and every write to a table."""
        commits = sum(weight.commits for weight in self._weights)
        return commits, sum(table.data._version for table in self._tables)

    # requests

    def _request(
        self,
        what: str,
        tokens: Sequence[int],
        sampling: Sampling | None,
        temperature: float,
        stream: int,
    ) -> Request:
        """A checked request that is not queued yet."""
        config = self.model.config
        if not isinstance(tokens, list | tuple | range):
            raise ValueError(f"{what} must be a list of ints, got {type(tokens).__name__}")
        if sampling is not None and not tokens:
            raise ValueError(f"{what} is empty; there is nothing to sample after")
        check_tokens(what, tokens, config.vocab_size)
        if sampling is not None:
            check_tokens(f"{what}: stop_ids", sampling.stop_ids, config.vocab_size)
        more = 0 if sampling is None else sampling.max_tokens
        total = len(tokens) + more
        limits = {"cache_tokens": self._memory.cache_tokens}
        if hasattr(config, "max_position_embeddings"):
            limits["max_position_embeddings"] = config.max_position_embeddings
        for name, limit in limits.items():
            if total > limit:
                sum_ = f" + max_tokens {more} = {total}" if more else ""
                raise ValueError(
                    f"{what} of {len(tokens)} tokens{sum_} does not fit {name} {limit}"
                )
        return Request(next(self._numbers), list(tokens), sampling, temperature, stream)


def check_tokens(what: str, tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse what is no int or not in [0, vocab_size), naming the position and the value."""
    for position, token in enumerate(tokens):
        if type(token) is not int:
            raise ValueError(f"{what}, position {position}: {token!r} is no int")
        if not 0 <= token < vocab_size:
            raise ValueError(
                f"{what}, position {position}: token {token} is not in [0, {vocab_size})"
            )
