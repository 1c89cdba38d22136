"""A run's folder: its config, a line of metrics a step, and checkpoints that are there whole or not at all."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file, save_file
from torch import Tensor

from unified_models.rl.config import Config, config_from, differences
from unified_models.rl.trainer import Trainer

KEPT = 2
"""Checkpoints; older ones are removed."""


class Storage:
    """The folder `out` of one run. checkpoints/step-000010 holds the state after 10 steps."""

    def __init__(self, folder: str | Path, config: Config) -> None:
        """Make or reopen the folder. ValueError: it holds a run of another config; every key that differs is named."""
        self.folder = Path(folder)
        self.metrics, self.checkpoints = self.folder / "metrics.jsonl", self.folder / "checkpoints"
        kept = self.folder / "config.json"
        if kept.exists():
            apart = differences(config_from(json.loads(kept.read_text()), str(kept)), config)
            if apart:
                raise ValueError(f"{self.folder}: a run of another config\n  " + "\n  ".join(apart))
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        _replace(kept, json.dumps(msgspec.to_builtins(config), indent=1) + "\n")

    def newest(self) -> Path | None:
        """The last complete checkpoint."""
        return max(self.checkpoints.glob("step-*"), default=None)

    def save(self, step: int, trainer: Trainer, more: Mapping[str, Any]) -> None:
        """Keep a checkpoint after `step` steps, written under another name and renamed when it is complete."""
        final = self.checkpoints / f"step-{step:06}"
        partial = self.checkpoints / f".{final.name}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        trainer.save(partial)
        told = {"step": step, "version": trainer.version} | dict(more)
        (partial / "state.json").write_text(json.dumps(told) + "\n")
        for path in (p for p in partial.rglob("*") if p.is_file()):
            with path.open("rb") as file:
                os.fsync(file.fileno())
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for old in sorted(self.checkpoints.glob("step-*"))[:-KEPT]:
            shutil.rmtree(old)

    def load(self, checkpoint: Path, trainer: Trainer) -> dict[str, Any]:
        """Go on from a checkpoint; what was told to `save`, with `step`."""
        told: dict[str, Any] = json.loads((checkpoint / "state.json").read_text())
        trainer.load(checkpoint, told["version"])
        return told

    def save_reference(self, tensors: Mapping[str, Tensor]) -> None:
        """Keep the reference policy, by checkpoint names."""
        partial = self.folder / ".reference.partial"
        save_file({name: t.contiguous().clone() for name, t in tensors.items()}, partial)
        partial.replace(self.folder / "reference.safetensors")

    def load_reference(self) -> dict[str, Tensor]:
        """What `save_reference` kept."""
        return load_file(self.folder / "reference.safetensors")

    def append(self, record: Mapping[str, Any]) -> None:
        """One more line of metrics."""
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def forget_after(self, step: int) -> None:
        """Drop the metrics of later steps: they are run again. A line cut short by a kill goes with them."""
        if self.metrics.exists():
            lines = [json.dumps(r) + "\n" for r in read_metrics(self.metrics) if r["step"] <= step]
            _replace(self.metrics, "".join(lines))


def read_metrics(file: Path) -> list[dict[str, Any]]:
    """The complete lines of a metrics file."""
    lines = file.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _replace(file: Path, text: str) -> None:
    partial = file.with_name(f".{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)
