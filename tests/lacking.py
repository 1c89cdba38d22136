"""What a test does where something that it needs is not installed."""

import os
from typing import NoReturn

import pytest


def without(reason: str, demanded_by: str) -> NoReturn:
    """Skip with the reason; fail where the environment variable `demanded_by` is 1, as in CI."""
    if os.environ.get(demanded_by) == "1":
        pytest.fail(reason)
    pytest.skip(reason)
