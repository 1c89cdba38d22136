"""Faults that others met in the field, as rows of one list (families A to G), and the tests that keep them out.

A test names its row in its own name or id: test_zero_blocks_stay_zero_C15. This file holds that every row which
touches what exists is named by a test, or is listed here with what it waits for.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROW = re.compile(r"(?<![A-Za-z0-9])([A-Ga-g]\d\d)(?![A-Za-z0-9])")

NOT_HERE = {
    "A12": "float32 head as an option of one side: there is no such option, the head is float32-accumulated everywhere",
    "A15": "expert-bias updates: the bias is frozen, nothing counts tokens",
    "G07": "kernels by the capability of a GPU: the CUDA backend has one kernel for all",
    "C09": "a kernel that takes power-of-two scales only: the CPU backend takes both kinds",
}
"""Row -> what it is about that does not exist here yet."""


def spans(*names: str) -> Iterator[str]:
    """A01-A05 as its rows."""
    for name in names:
        first, _, last = name.partition("-")
        yield from (f"{name[0]}{n:02}" for n in range(int(first[1:]), int((last or first)[1:]) + 1))


NO_SUCH_ROW = {"A18", "A29", "A32", "C02", "C11", "C18", "D06", "E04", "B08", "F07", "F11", "G02"}
FAMILIES = (
    *("A01-A17", "A19-A20", "A23-A38", "B01-B17", "C01-C28", "D01-D24", "E01-E11"),
    *("F01-F10", "F12-F18", "G01-G10"),
)
ROWS = sorted(set(spans(*FAMILIES)) - NO_SUCH_ROW)


def named() -> dict[str, list[str]]:
    """Row -> where a test names it: in a function's name, or in a string (an id) of a test file."""
    found: dict[str, list[str]] = {}
    for file in sorted(TESTS.rglob("test_*.py")):
        if file == Path(__file__):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            texts = [getattr(node, "name", None), getattr(node, "value", None)]
            for text in texts:
                if isinstance(text, str) and (isinstance(node, ast.FunctionDef) or len(text) < 120):
                    for part in re.split(r"[_\W]+", text):
                        if ROW.fullmatch(part):
                            found.setdefault(part.upper(), []).append(
                                f"{file.relative_to(TESTS)}:{getattr(node, 'lineno', 0)}"
                            )
    return found


NAMED = named()


@pytest.mark.parametrize("row", ROWS)
def test_every_row_has_a_test_or_a_reason(row: str) -> None:
    assert (row in NAMED) != (row in NOT_HERE), (
        f"{row}: tests {NAMED.get(row, 'none')}, reason {NOT_HERE.get(row, 'none')}"
    )
