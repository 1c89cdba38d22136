"""Tests that need a GPU: `make test-gpu`. Elsewhere they are skipped, and say so."""

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folder's, not the session's: pytest hands every conftest all items."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.path.parent.parts:
            item.add_marker(pytest.mark.skip(reason="needs a GPU that Triton knows"))
