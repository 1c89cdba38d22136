"""The tiny models that these tests cut."""

from pathlib import Path

import pytest

import unified_models as um
from tests.adapters.fsdp.layouts import MODELS


@pytest.fixture(scope="session", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each architecture."""
    path = tmp_path_factory.mktemp("fsdp") / request.param
    um.make_tiny(request.param, path, seed=3, **MODELS[request.param])
    return path
