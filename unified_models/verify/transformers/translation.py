"""What stands between a checkpoint of ours and transformers' class for it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


def _same(raw: Mapping[str, Any]) -> dict[str, Any]:
    return dict(raw)


def _nothing(_: Any) -> None:
    pass


@dataclass(frozen=True)
class Translation:
    """config: our config.json, without quantisation, in their spelling. prepare: sets on their finished model what no
    config can say."""

    config: Callable[[Mapping[str, Any]], dict[str, Any]] = _same
    prepare: Callable[[Any], None] = _nothing
