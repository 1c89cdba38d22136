"""Pictures of runs: reward, KL, unequal bits, entropy and throughput over steps, several runs in each panel."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from unified_models.rl.storage import read_metrics

Value = Callable[[dict[str, Any]], float]
PANELS: dict[str, Value] = {
    "reward": lambda r: r["reward"],
    "KL(rollout || training), k3, nats": lambda r: r["kl"],
    "unequal bits, share of tokens": lambda r: r["unequal"] / r["compared"],
    "entropy, nats a token": lambda r: r["entropy"],
    "sampled tokens a second": lambda r: r["tokens_per_second"],
}
SMOOTH = 5
"""Steps in a running median of the throughput; nothing else is smoothed."""
SMALLEST = 1e-10
"""KL below which the axis is linear, so that an exact 0 is on it."""
COLOURS = {"consistent": "C0", "baseline": "C3"}
DASHES = ("-", "--", ":", "-.")
"""One a seed."""


def draw(folders: Sequence[str | Path], file: str | Path) -> None:
    """Write a PNG with one panel a metric and one curve a run; the colour is the mode, the dash the seed.

    Raises ValueError where matplotlib is missing, or a folder holds no metrics or no comparison.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("plots need matplotlib: pip install 'unified-models[plots]'") from None
    runs = [_read(Path(folder)) for folder in folders]
    figure = Figure(figsize=(11, 5.6), layout="constrained")
    *places, last = figure.subplots(2, 3).flat
    last.set_axis_off()
    for axes, (title, value) in zip(places, PANELS.items(), strict=True):
        for config, records in runs:
            values = [value(r) for r in records]
            if "second" in title:
                at = range(len(values))
                values = [statistics.median(values[max(0, i - SMOOTH + 1) : i + 1]) for i in at]
            axes.plot(
                [r["step"] for r in records],
                values,
                color=COLOURS[config["mode"]],
                linestyle=DASHES[config["seed"] % len(DASHES)],
                linewidth=1.1,
                label=f"{config['mode']}, seed {config['seed']}",
            )
        axes.set_title(title, fontsize=10)
        if title.startswith("KL"):
            top = max(value(r) for _, records in runs for r in records)
            axes.set_yscale("symlog", linthresh=SMALLEST)
            axes.set_ylim(-SMALLEST / 2, max(10 * SMALLEST, 2 * top))
        axes.set_xlabel("step")
        axes.grid(alpha=0.3)
    last.legend(*places[0].get_legend_handles_labels(), loc="center")
    names = dict.fromkeys(
        f"{config['model']['architecture']}, {config['task']}" for config, _ in runs
    )
    figure.suptitle("; ".join(names), fontsize=11)
    figure.savefig(file, dpi=90)


def _read(folder: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    for name in ("config.json", "metrics.jsonl"):
        if not (folder / name).exists():
            raise ValueError(f"{folder}: holds no run, {name} is missing")
    config = json.loads((folder / "config.json").read_text())
    records = read_metrics(folder / "metrics.jsonl")
    if not records or any(not r["compared"] for r in records):
        raise ValueError(f"{folder}: {len(records)} steps, and not each compared tokens")
    return config, records
