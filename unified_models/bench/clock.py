"""Timing of several things in one run, in turn, so that a machine that slows down slows all of them."""

import gc
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, TypeVar

T = TypeVar("T")


def in_turn(works: Mapping[str, Callable[[], T]], repeats: int) -> dict[str, list[T]]:
    """One round to warm up, then `repeats` rounds, every other one backwards; what each work returned in each."""
    returned: dict[str, list[T]] = {name: [] for name in works}
    for number in range(repeats + 1):
        for name in list(works)[:: 1 if number % 2 else -1]:
            gc.collect()  # what an earlier work left must not be swept up on this one's time
            value = works[name]()
            if number:
                returned[name].append(value)
    return returned


def seconds_of(work: Callable[[], Any]) -> float:
    """How long one call takes, by the clock on the wall."""
    began = perf_counter()
    work()
    return perf_counter() - began
