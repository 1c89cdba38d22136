"""What a task is: problems, a partner who answers a model's turn, demonstrations, and a verifier."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """text: what the model is given first. a, b: two whole numbers to add."""

    text: str
    a: int
    b: int


@dataclass(frozen=True)
class Part:
    """A stretch of a conversation: token ids, and whether the model says them."""

    ids: list[int]
    said: bool


class Task(Protocol):
    """All methods are functions of their arguments alone: no state, no generator."""

    name: str
    max_tokens: int
    """of one turn of the model"""

    def problem(self, seed: int, step: int, index: int) -> Problem:
        """Problem `index` of one step."""

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """What the tool says after the model's last turn; None: the conversation is over."""

    def reward(self, problem: Problem, turns: Sequence[str]) -> float:
        """In [0, 1], from the model's turns alone."""

    def demonstration(self, seed: int, step: int, index: int, right: float) -> list[Part]:
        """A whole conversation, with a right answer at the probability `right`."""


def numbers(*key: object) -> random.Random:
    """Random numbers that depend on the key only (Python's generator, seeded by the key's text)."""
    return random.Random("/".join(map(str, key)))
