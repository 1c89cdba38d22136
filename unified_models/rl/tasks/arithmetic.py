"""One turn: the sum of two small digits."""

from collections.abc import Sequence

from unified_models.rl.tasks.task import Part, Problem, numbers
from unified_models.rl.tasks.tokenizer import EOS, encode

LARGEST = 5
"""Of the digits."""


class Arithmetic:
    """`Sum: 3+4=` is answered by `7` and the end of the answer; 1 for that, 0 for all else."""

    name = "arithmetic"
    max_tokens = 3

    def problem(self, seed: int, step: int, index: int) -> Problem:
        """Two digits, each from 0 to LARGEST."""
        draw = numbers(self.name, "problem", seed, step, index)
        a, b = draw.randrange(LARGEST + 1), draw.randrange(LARGEST + 1)
        return Problem(f"Sum: {a}+{b}=", a, b)

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """There is no second turn."""
        return None

    def reward(self, problem: Problem, turns: Sequence[str]) -> float:
        """1 for the sum in its shortest spelling."""
        return float(list(turns) == [str(problem.a + problem.b)])

    def demonstration(self, seed: int, step: int, index: int, right: float) -> list[Part]:
        """The weak teacher is off by 1 to 3 where it is wrong."""
        draw = numbers(self.name, "demonstration", seed, step, index)
        a, b = draw.randrange(LARGEST + 1), draw.randrange(LARGEST + 1)
        off = 0 if draw.random() < right else draw.choice((-3, -2, -1, 1, 2, 3))
        answer = [*encode(str(abs(a + b + off))), EOS]
        return [Part(encode(f"Sum: {a}+{b}="), False), Part(answer, True)]
