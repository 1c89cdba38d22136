"""Several turns: the model calls a calculator, reads what it says, and answers."""

import re
from collections.abc import Sequence

from unified_models.rl.tasks.task import Part, Problem, numbers
from unified_models.rl.tasks.tokenizer import EOS, encode

CALL = re.compile(r"\?(\d+)\+(\d+)\n")


LARGEST = 5
"""Of the digits."""


class Calculator:
    r"""`Call: 3+4\n` - `?3+4\n` - tool: `7\n` - `=7` and the end of the answer.

    The tool adds what it is asked to add; a call that it cannot read is answered by `!\n`. Reward: 1 if the last turn
    is `=` and the sum, else 0.2 if the call was right, else 0.
    """

    name = "calculator"
    max_tokens = 6

    def problem(self, seed: int, step: int, index: int) -> Problem:
        """Two digits, each from 0 to LARGEST."""
        draw = numbers(self.name, "problem", seed, step, index)
        a, b = draw.randrange(LARGEST + 1), draw.randrange(LARGEST + 1)
        return Problem(f"Call: {a}+{b}\n", a, b)

    def reply(self, problem: Problem, turns: Sequence[str]) -> str | None:
        """After the first turn, the sum of what was asked for; nothing after the second."""
        if len(turns) != 1:
            return None
        call = CALL.fullmatch(turns[0])
        return "!\n" if call is None else f"{int(call[1]) + int(call[2])}\n"

    def reward(self, problem: Problem, turns: Sequence[str]) -> float:
        """1, 0.2 or 0; see the class."""
        if len(turns) == 2 and turns[1] == f"={problem.a + problem.b}":
            return 1.0
        return 0.2 if turns[:1] == [f"?{problem.a}+{problem.b}\n"] else 0.0

    def demonstration(self, seed: int, step: int, index: int, right: float) -> list[Part]:
        """The weak teacher asks for another second digit, or misreads the tool by 1 to 3."""
        draw = numbers(self.name, "demonstration", seed, step, index)
        a, b = draw.randrange(LARGEST + 1), draw.randrange(LARGEST + 1)
        asked, off = b, 0
        if draw.random() >= right:
            if draw.random() < 0.5:
                asked = draw.randrange(LARGEST + 1)
            else:
                off = draw.choice((-3, -2, -1, 1, 2, 3))
        told = a + asked
        return [
            Part(encode(f"Call: {a}+{b}\n"), False),
            Part(encode(f"?{a}+{asked}\n"), True),
            Part(encode(f"{told}\n"), False),
            Part([*encode(f"={abs(told + off)}"), EOS], True),
        ]
