"""The tasks: deterministic problems, verifiers that take the right answer and no other, demonstrations that agree."""

import pytest

from unified_models.rl.episodes import demonstrated
from unified_models.rl.tasks import TASKS, Problem
from unified_models.rl.tasks.tokenizer import EOS, decode, encode

NAMES = sorted(TASKS)


@pytest.mark.parametrize("name", NAMES)
def test_problems_are_functions_of_their_place(name: str) -> None:
    task = TASKS[name]
    first = [task.problem(0, step, i) for step in range(3) for i in range(8)]
    assert first == [task.problem(0, step, i) for step in range(3) for i in range(8)]
    assert len(set(first)) > 8
    assert first != [task.problem(1, step, i) for step in range(3) for i in range(8)]


@pytest.mark.parametrize("name", NAMES)
def test_demonstrations_earn_what_the_teacher_is_worth(name: str) -> None:
    """Played back through the tool and the verifier, all of a perfect teacher's are right; of a weak one's, a part."""
    task = TASKS[name]
    for right, low, high in ((1.0, 1.0, 1.0), (0.5, 0.35, 0.7), (0.0, 0.0, 0.4)):
        earned = []
        for i in range(300):
            parts = task.demonstration(0, 0, i, right)
            text = decode(parts[0].ids)
            a, b = (int(digit) for digit in text.strip("=\n").split(" ")[-1].split("+"))
            problem, turns = Problem(text, a, b), []
            for said, heard in zip(parts[1::2], [*parts[2::2], None], strict=True):
                assert said.said and (heard is None or not heard.said)
                assert len(said.ids) <= task.max_tokens
                turns.append(decode(said.ids))
                assert task.reply(problem, turns) == (None if heard is None else decode(heard.ids))
            earned.append(task.reward(problem, turns))
            assert all(0 <= r <= 1 for r in earned)
        assert low <= sum(r == 1 for r in earned) / 300 <= high


def test_arithmetic_reward() -> None:
    task, problem = TASKS["arithmetic"], Problem("Sum: 5+5=", 5, 5)
    assert task.reward(problem, ["10"]) == 1
    for wrong in ("11", "010", " 10", "10\n", "1", "", "\ufffd10"):
        assert task.reward(problem, [wrong]) == 0, wrong


def test_calculator_reward_and_tool() -> None:
    task, problem = TASKS["calculator"], Problem("Call: 3+4\n", 3, 4)
    assert task.reply(problem, ["?3+4\n"]) == "7\n"
    assert task.reply(problem, ["?33+4\n"]) == "37\n"
    assert task.reply(problem, ["3+4\n"]) == task.reply(problem, ["?3+4"]) == "!\n"
    assert task.reply(problem, ["?3+4\n", "=7"]) is None
    assert task.reward(problem, ["?3+4\n", "=7"]) == 1
    assert task.reward(problem, ["?1+1\n", "=7"]) == 1
    assert task.reward(problem, ["?3+4\n", "=8"]) == 0.2
    assert task.reward(problem, ["?3+5\n", "=8"]) == 0
    assert task.reward(problem, ["=7"]) == 0


def test_tokenizer() -> None:
    assert decode(encode("3+4=\u00e9\n")) == "3+4=\u00e9\n"
    assert decode([55, EOS]) == "7"
    assert decode([55, 300]) == "7\ufffd" != decode([55])


def test_response_mask_marks_what_the_model_says() -> None:
    ids, said = demonstrated(TASKS["calculator"].demonstration(0, 0, 0, 1.0))
    own = [i for i, s in zip(ids, said, strict=True) if s]
    assert decode(own).startswith("?") and own[-1] == EOS and len(own) < len(ids)
    assert said[0] is False
