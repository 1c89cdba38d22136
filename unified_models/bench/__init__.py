"""Times of work that was first shown right, on a tiny model."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from unified_models.bench.cases import Case, Cases, Size
from unified_models.bench.clock import in_turn
from unified_models.bench.conditions import conditions
from unified_models.bench.jobs import Job, memory_jobs, whole_job
from unified_models.bench.report import JobTimes, Result, Speed
from unified_models.bench.scan import ScanResult, scan_results
from unified_models.checkpoint import load
from unified_models.tiny import make_tiny
from unified_models.verify.compare import Comparison

__all__ = ["Result", "ScanResult", "Size", "run", "scan_results"]


def run(
    name: str,
    size: Size,
    *,
    numerics: str = "deployed",
    seed: int = 0,
    command: str = "",
    config: Mapping[str, Any] | None = None,
) -> Result:
    """Make a tiny model of an architecture, check its bits, then time it.

    Every job that is timed is run once before, and each of its logprobs compared with the training forward; nothing
    is timed if a bit differs. command: what was typed, for the record. config: other values than the tiny ones.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / name
        make_tiny(name, path, seed=seed, **(config or {}))
        model = load(path, numerics=numerics)
    told = conditions(name, model, command)
    first, others = whole_job(model, size, seed), memory_jobs(model, size, seed)
    gate = sum((job.check(model, seed) for job in (first, *others)), Comparison(0, 0))
    if gate.unequal or not gate.compared:
        return Result(name, told, gate)

    def speeds(cases: list[Case]) -> list[Speed]:
        rounds = in_turn({case.name: case.work for case in cases}, size.repeats)
        return [Speed(case.name, case.tokens, rounds[case.name]) for case in cases]

    def times(jobs: list[Job]) -> list[JobTimes]:
        rounds = in_turn({job.name: partial(job.run, model, seed) for job in jobs}, size.repeats)
        return [JobTimes(job.name, len(job.prompts) * job.tokens, rounds[job.name]) for job in jobs]

    cases = Cases(model, size, seed)
    return Result(
        name,
        told,
        gate,
        speeds(cases.decode_cases()),
        speeds(cases.pack_cases()),
        [*times([first]), *times(others)],
    )
