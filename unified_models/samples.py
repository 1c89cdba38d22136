"""Samples as `unified-models generate` shows them: a table and a line about the work, or JSON."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from unified_models.engine import Output, Stats


def record(prompt: list[int], out: Output) -> dict[str, Any]:
    """What is known of a sample. The logprobs, read back as float32, have the same bits."""
    return {
        "prompt": prompt,
        "ids": out.ids,
        "logprobs": out.logprobs.tolist(),
        "versions": out.versions,
        "reason": out.reason,
    }


def table(prompts: Sequence[list[int]], outs: Sequence[Output]) -> Table:
    """A row a sample; its logprob is the sum of its tokens', added in float64."""
    made = Table()
    for header in ("prompt", "sampled", "logprob", "ended by"):
        made.add_column(header, justify="right" if header == "logprob" else "left")
    for ids, out in zip(prompts, outs, strict=True):
        cells = (" ".join(map(str, ids)), " ".join(map(str, out.ids)))
        made.add_row(*cells, f"{float(out.logprobs.double().sum()):.4f}", out.reason)
    return made


def work(stats: Stats) -> str:
    """What an engine did, in a line."""
    waited = f", {stats.waited_for_state} had to wait for a place for their state"
    return (
        f"{stats.tokens_sampled} tokens sampled and {stats.tokens} run in {stats.steps} steps, "
        f"{stats.prefix_hits} found in the prefix cache{waited if stats.waited_for_state else ''}; "
        f"{stats.seconds_total:.2f} s"
    )
