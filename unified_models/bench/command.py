"""`unified-models bench`: what it prints as it goes."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.text import Text

from unified_models import bench, registry
from unified_models.bench import Result, ScanResult, Size


def times(
    names: Sequence[str] | None,
    scan: bool,
    repeats: int,
    numerics: str,
    threads: int,
    console: Console,
    seed: int,
    command: str,
) -> list[Result | ScanResult]:
    """Results of the architectures (None: all), or of the scan alone, each shown when it is there."""
    torch.set_num_threads(threads)
    told: dict[str, Any] = {"seed": seed, "command": command}
    size = Size(repeats=repeats)
    models = (
        bench.run(name, size, numerics=numerics, **told)
        for name in names or registry.architectures()
    )
    results: Iterator[Result | ScanResult] = bench.scan_results(repeats, **told) if scan else models
    kept = list[Result | ScanResult]()
    for result in results:
        console.print(result.table() if result.ok else Text(result.refusal, style="red"))
        kept.append(result)
    return kept
