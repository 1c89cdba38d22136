"""What torch's profiler counted, as lines."""

from typing import Any

SHOWN = 60
"""Kernels, those that take longest."""


def by_time(known: Any, runs: int = 1, *, on_gpu: bool = True) -> tuple[float, list[str]]:
    """Of a `torch.profiler.profile` over so many runs: milliseconds of a run in kernels (on a CPU: in operators), and a
    line each, the longest first: microseconds of a run, calls of a run, microseconds of a call."""
    attribute = f"self_{'device' if on_gpu else 'cpu'}_time_total"
    times = sorted(((getattr(e, attribute), e) for e in known.key_averages()), key=lambda t: -t[0])
    lines = [
        f"{whole / runs:11.1f} us, {e.count / runs:8.1f} x {whole / e.count:10.2f} us  {e.key[:90]}"
        for whole, e in times[:SHOWN]
    ]
    return sum(whole for whole, _ in times) / runs / 1e3, lines
