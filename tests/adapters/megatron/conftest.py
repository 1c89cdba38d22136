"""Where megatron-core is: importable, or in a folder of the virtual environment that .ci/setup fills."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.lacking import without


@pytest.fixture(scope="session")
def megatron() -> str:
    """Where it was found; processes that tests start find it, too. Skips with the reason where there is none, unless
    REQUIRE_TRAINERS=1 asks for it."""
    folder, told = Path(sys.prefix, "megatron"), Path(sys.prefix, "megatron.txt")
    if not there() and (folder / "megatron" / "core").is_dir():
        sys.path.append(str(folder))  # not first: it brings nothing else
    if not there():
        reason = (
            f"no megatron-core: {told.read_text().strip() if told.exists() else 'not installed'}"
        )
        without(reason, "REQUIRE_TRAINERS")
    spec = find_spec("megatron.core")
    assert spec is not None and spec.origin is not None
    return spec.origin


def there() -> bool:
    """Whether megatron.core can be imported; nothing is."""
    return find_spec("megatron") is not None and find_spec("megatron.core") is not None
