"""The scheduler: which tokens of which requests make the next step, and who gives way when memory runs out."""

from collections import deque
from dataclasses import dataclass

from unified_models.engine import prefix
from unified_models.engine.memory import PagedMemory
from unified_models.engine.request import Request, State
from unified_models.engine.stats import Stats


@dataclass(frozen=True)
class Work:
    """Tokens start .. end of a request."""

    request: Request
    start: int
    end: int

    @property
    def asked(self) -> range:
        """The positions whose rows say something new: a token to sample, or logprobs that are still missing."""
        request = self.request
        if request.sampling is None:
            return range(max(self.start, request.wanted), self.end)
        return range(self.end - 1 if self.end == len(request.tokens) else self.end, self.end)


class Scheduler:
    """Continuous batching with chunked prefill: `step_tokens` tokens a step, over as many requests as they reach.

    Running requests come first, oldest first; then waiting ones are admitted while there are seats and their known
    tokens fit beside the others. When a running request lacks a page, the youngest one is preempted: it gives all of
    its pages back and waits at the front of the queue. The oldest can take everything, so it always gets on.
    """

    def __init__(
        self, memory: PagedMemory, step_tokens: int, prefix_cache: bool, stats: Stats
    ) -> None:
        self.memory, self.step_tokens = memory, step_tokens
        self.prefix_cache, self.stats = prefix_cache, stats
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._seats = list(range(memory.seats - 1, -1, -1))

    def add(self, request: Request) -> None:
        """Queue a request behind all others."""
        self.waiting.append(request)

    def plan(self) -> list[Work]:
        """The work of the next step, its pages taken. Empty only if there are no requests."""
        budget = self.step_tokens
        work: list[Work] = []
        at = 0
        while at < len(self.running) and budget:
            request = self.running[at]
            end = min(request.target, request.computed + budget)
            if not self._grow(request, end):
                break
            work.append(Work(request, request.computed, end))
            budget -= end - request.computed
            at += 1
        while self.waiting and budget and self._seats:
            request = self.waiting[0]
            if not self._has_state(request) or not self._admit(request):
                break
            end = min(request.target, request.computed + budget)
            grown = self.memory.grow(request.seat, end)
            assert grown, "an admitted request has room for all of its tokens"
            work.append(Work(request, request.computed, end))
            budget -= end - request.computed
        assert work or not (self.running or self.waiting), "requests, and nothing to do"
        return work

    def settle(self, work: list[Work]) -> None:
        """The step has run: its tokens are in memory."""
        for item in work:
            request = item.request
            again = min(request.reached, item.end) - item.start
            self.stats.tokens_recomputed += max(0, again)
            request.computed = item.end
            request.reached = max(request.reached, item.end)
            if self.prefix_cache:
                self._name(request, item.end)
            digests = request.digests if self.prefix_cache else None
            self.memory.settle(request.seat, item.end, digests)

    def finish(self, request: Request, state: State = "finished") -> None:
        """The request leaves, wherever it is; its pages are released."""
        if request.state == "running":
            self.running.remove(request)
            self._vacate(request)
        elif request.state == "waiting":
            self.waiting.remove(request)
        request.state = state

    def restart(self) -> None:
        """The weights have changed: nothing in memory is valid. Running requests wait, in order, to be run again."""
        while self.running:
            self._preempt(self.running[-1])
        self.memory.forget()
        for request in self.waiting:
            request.restart()

    def _grow(self, request: Request, tokens: int) -> bool:
        """Take pages, from the youngest if need be; False if the request was itself the youngest."""
        while not self.memory.grow(request.seat, tokens):
            youngest = self.running[-1]
            assert youngest is not self.running[0], "a single request fits, by the check at submit"
            self._preempt(youngest)
            if youngest is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        self.running.remove(request)
        self._vacate(request)
        request.state = "waiting"
        self.waiting.appendleft(request)
        self.stats.preemptions += 1

    def _has_state(self, request: Request) -> bool:
        """Whether a place for its scan state is free; otherwise the request waits for one."""
        slots = self.memory.state_slots
        if slots is None or len(self.running) < slots:
            return True
        self.stats.waited_for_state += not request.waited
        request.waited = True
        return False

    def _admit(self, request: Request) -> bool:
        """Give the request a seat and the pages of its longest known prefix, if all it has now can be run."""
        hit = 0
        if self.prefix_cache and request.wanted:
            self._name(request, request.wanted)
            tables, block = self.memory.tables.values(), self.memory.page_tokens
            hit = prefix.longest(tables, request.digests, block, request.wanted)
        seat = self._seats[-1]
        if hit:
            self.memory.adopt(seat, hit, request.digests)
        if not self.memory.room(seat, request.target, self.step_tokens):
            self.memory.release(seat)
            return False
        self._seats.pop()
        self.waiting.popleft()
        self.running.append(request)
        request.seat, request.computed, request.state = seat, hit, "running"
        self.stats.prefix_hits += hit
        return True

    def _name(self, request: Request, end: int) -> None:
        block, version = self.memory.page_tokens, self.stats.weight_version
        prefix.extend(request.digests, request.tokens, end, block, version)

    def _vacate(self, request: Request) -> None:
        self.memory.release(request.seat)
        self._seats.append(request.seat)
        request.seat, request.computed = -1, 0
