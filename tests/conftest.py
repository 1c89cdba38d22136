"""What every test starts from: one thread, one seed, and poisoned memory in the tests of operators."""

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

OPS = Path(__file__).parent / "ops"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The slow ones first, slowest first, so that no worker is left alone with one at the end."""
    items.sort(key=seconds, reverse=True)


def seconds(item: pytest.Item) -> float:
    """About how long a test takes: `slow(200)` says it, `slow` alone means more than ten."""
    slow = item.get_closest_marker("slow")
    return 0.0 if slow is None else float(slow.args[0] if slow.args else 10)


@pytest.fixture(autouse=True)
def seed() -> Iterator[int]:
    """Every test starts from the same seed, on one thread."""
    torch.set_num_threads(1)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield 0
    torch.set_num_threads(1)


@pytest.fixture(params=[1, 2], ids=lambda n: f"{n}thread")
def threads(request: pytest.FixtureRequest) -> int:
    """Runs the test once on one thread and once on two; its value is their number."""
    torch.set_num_threads(request.param)
    return request.param


def poison(memory: Tensor) -> Tensor:
    """Fill fresh memory with what no test survives: NaN, a large positive whole number, or True."""
    if memory.is_meta or memory.layout != torch.strided or memory.numel() == 0:
        return memory
    if memory.dtype == torch.bool:
        return memory.fill_(True)
    floats = memory.is_floating_point() or memory.is_complex()
    memory.untyped_storage().fill_(
        0xFF if floats else 0x5B
    )  # all ones is NaN in every float format
    return memory


def poisoning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`make`, with its result poisoned."""

    def poisoned_make(*args: Any, **kwargs: Any) -> Tensor:
        return poison(make(*args, **kwargs))

    return poisoned_make


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that torch hands out uninitialised is poisoned: an output that nobody wrote cannot pass."""
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (Tensor, "new_empty"),
        (Tensor, "new_empty_strided"),
    ):
        monkeypatch.setattr(owner, name, poisoning(getattr(owner, name)))


@pytest.fixture(autouse=True)
def poisoned_in_ops(request: pytest.FixtureRequest) -> None:
    """Tests of operators run on poisoned memory without asking."""
    if OPS in request.path.parents:
        request.getfixturevalue("poisoned")
