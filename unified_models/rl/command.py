"""`unified-models rl`: a run with a line every few steps and a summary, or plots of runs that are there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from unified_models.arguments import assignments
from unified_models.outside import run_adapter
from unified_models.rl.config import Config, read_config
from unified_models.rl.recipe import run
from unified_models.rl.rollout import Rollout
from unified_models.rl.storage import Storage, read_metrics
from unified_models.rl.trainer import Trainer
from unified_models.verify.compare import UnequalError

EVERY = 10
"""Steps between two lines."""


def train(paths: Sequence[Path], changes: Sequence[str], console: Console) -> bool:
    """Run the one config in `paths`, with changes as `key=value` texts; whether its check passed.

    Raises ValueError for more than one path, and as `read_config` and `run` do.
    """
    if len(paths) != 1:
        raise ValueError(f"{len(paths)} configs, {', '.join(map(str, paths))}: one at a time")
    config = read_config(paths[0], assignments(list(changes)))
    if config.engine == "vllm":
        return run_adapter("vllm.rollout", paths[0], *changes) == 0
    if config.train.processes > 1:
        return run_adapter("fsdp.recipe", paths[0], *changes) == 0
    return follow(config, console)


def follow(
    config: Config,
    console: Console,
    rollout: Rollout | None = None,
    trainer: Trainer | None = None,
) -> bool:
    """Run a config, with another engine or trainer if one is given; whether its check passed. ValueError: see `run`."""
    console.print(
        f"{config.out}: {config.task}, {config.mode}, {config.steps} steps after {config.warmup.steps} of warm-up, "
        f"seed {config.seed}",
        highlight=False,
    )
    try:
        for record in run(config, rollout=rollout, trainer=trainer):
            if record["step"] % EVERY == 0 or record["step"] == 1:
                console.print(line(record), highlight=False)
    except UnequalError as error:
        console.print(Text(str(error), style="red"))
        return False
    records = read_metrics(Storage(config.out, config).metrics)
    console.print(summary(records))
    return config.mode == "baseline" or config.checking == "off" or passed(records)


def passed(records: Sequence[dict[str, Any]]) -> bool:
    """Whether each step compared tokens and none had an unequal bit; False for no steps."""
    return bool(records) and all(r["compared"] and r["unequal"] == 0 for r in records)


def line(record: dict[str, Any]) -> str:
    """One step in one line."""
    compared = "" if record["compared"] is None else f" of {record['compared']}"
    return (
        f"step {record['step']}: reward {record['reward']:.3f}, unequal {record['unequal']}{compared}, "
        f"entropy {record['entropy']:.3f}, {record['tokens_per_second']:.0f} tokens/s"
    )


def summary(records: Sequence[dict[str, Any]]) -> Table:
    """What a whole run showed."""
    table = Table()
    for header in ("steps", "tokens", "compared", "unequal", "reward, first 10", "reward, last 10"):
        table.add_column(header, justify="right")
    counts = [sum(r[key] or 0 for r in records) for key in ("tokens", "compared", "unequal")]
    ends = [mean_reward(part) for part in (records[:10], records[-10:])]
    table.add_row(str(len(records)), *map(str, counts), *(f"{value:.3f}" for value in ends))
    return table


def mean_reward(records: Sequence[dict[str, Any]]) -> float:
    """Over steps; in [0, 1]."""
    return float(sum(r["reward"] for r in records) / max(len(records), 1))


def draw(folders: Sequence[Path], file: Path) -> bool:
    """Plot the metrics of run folders side by side; True. ValueError: see `plots.draw`."""
    from unified_models.rl.plots import draw as plot

    plot(folders, file)
    return True
