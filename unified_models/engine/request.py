"""A request: its tokens so far, what was reported about them, and how far they have been run."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from unified_models.engine import draw
from unified_models.engine.sampling import Sampling

State = Literal["waiting", "running", "finished", "aborted"]


@dataclass(frozen=True)
class Output:
    """What was sampled. logprobs: float32, one a token, log_softmax(logits / T) at the token; versions: the weight
    version that each token was sampled under; reason: "length", "stop" or "aborted"."""

    ids: list[int]
    logprobs: Tensor
    versions: list[int]
    reason: str


@dataclass(eq=False)
class Request:
    """Tokens to be run, and then either sampled onto (sampling given) or scored (None).

    A scoring request reports the logprob of each of its tokens but the first, from the row of the token before it.
    The token with the row at position p is always tokens[p + 1]: given, or sampled from that row.
    """

    number: int
    tokens: list[int]
    sampling: Sampling | None
    temperature: float
    stream: int = 0
    state: State = "waiting"
    seat: int = -1
    computed: int = 0
    """tokens whose rows are in memory"""
    reached: int = 0
    """tokens that were ever computed"""
    digests: list[bytes] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    reason: str = ""
    waited: bool = False
    """had to wait for a place for its scan state"""

    def __post_init__(self) -> None:
        self.num_given = len(self.tokens)

    @property
    def done(self) -> bool:
        return self.state in ("finished", "aborted")

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.num_given :]

    @property
    def target(self) -> int:
        """How many tokens must be run before the request samples or is finished."""
        return len(self.tokens) - (self.sampling is None)

    @property
    def wanted(self) -> int:
        """The first position whose row is still asked for; everything before may come from memory."""
        return len(self.logprobs) if self.sampling is None else len(self.tokens) - 1

    @property
    def size(self) -> int:
        """Tokens when it is done."""
        return self.num_given + (0 if self.sampling is None else self.sampling.max_tokens)

    def key(self) -> int | None:
        """The key of the next draw; None: greedy."""
        assert self.sampling is not None
        if not self.sampling.temperature:
            return None
        return draw.key(self.sampling.seed, self.stream, len(self.tokens) - self.num_given)

    def add(self, token: int, logprob: float, version: int) -> None:
        """One more sampled token."""
        assert self.sampling is not None
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.sampling.stop_ids:
            self.reason = "stop"
        elif len(self.logprobs) == self.sampling.max_tokens:
            self.reason = "length"

    def restart(self) -> None:
        """The weights have changed. Sampled tokens keep what was reported; a sequence is scored under one version."""
        self.digests.clear()
        if self.sampling is None:
            self.logprobs.clear()

    def output(self) -> Output:
        logprobs = torch.tensor(self.logprobs, dtype=torch.float32)
        return Output(self.sampled, logprobs, list(self.versions), self.reason)
