"""What one run of the recipe is told: a TOML file, read strictly."""

import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from unified_models.rl.losses import CORRECTIONS, LOSSES
from unified_models.rl.tasks import TASKS
from unified_models.sharding import PACKED

ENGINES = ("embedded", "vllm")
MODES = ("consistent", "baseline")
CHECKS = ("stop", "report", "off")
LAYOUT = ("processes", "experts", "tokens", "packed", "recompute")
FREE = ("out", "steps", "checkpoint_every", *(f"train.{key}" for key in LAYOUT))
"""Keys that a resumed run may change: where it lies, how long it is, how often it is saved, who computes it."""


def _one_of(key: str, value: str, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"{key} = {value!r}; known: {', '.join(known)}")


def _least(table: Any, **least: int) -> None:
    for key, value in least.items():
        if getattr(table, key) < value:
            raise ValueError(f"{key} = {getattr(table, key)}; at least {value}")


def _between(table: Any, low: float, high: float, *keys: str) -> None:
    for key in keys:
        value = getattr(table, key)
        if not low <= value <= high or value == math.inf:
            raise ValueError(f"{key} = {value}; a finite number from {low} to {high}")


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file: no key beyond the fields."""


class ModelConfig(_Strict, frozen=True, kw_only=True):
    """Either architecture, with overrides of its tiny config, or the folder of a checkpoint."""

    architecture: str = ""
    overrides: dict[str, Any] = {}
    folder: str = ""
    numerics: str = "deployed"

    def __post_init__(self) -> None:
        if bool(self.architecture) == bool(self.folder):
            raise ValueError(
                f"architecture = {self.architecture!r} and folder = {self.folder!r}; exactly one of them"
            )
        if self.folder and self.overrides:
            raise ValueError(
                f"overrides = {self.overrides} of a checkpoint, folder = {self.folder!r}"
            )


class WarmupConfig(_Strict, frozen=True, kw_only=True):
    """Supervised steps before the first rollout. batch: demonstrations a step. right: the share of them that is
    right; a weak teacher, so that there is something left to learn from rewards."""

    steps: int = 100
    batch: int = 64
    lr: float = 3e-3
    right: float = 0.5

    def __post_init__(self) -> None:
        _least(self, steps=0, batch=1)
        _between(self, 0.0, math.inf, "lr")
        _between(self, 0.0, 1.0, "right")


class RolloutConfig(_Strict, frozen=True, kw_only=True):
    """prompts: a step. group: samples of each. The rest is sizes of the embedded engine."""

    prompts: int = 8
    group: int = 8
    temperature: float = 1.0
    cache_tokens: int = 8192
    step_tokens: int = 512
    page_tokens: int = 16
    max_sequences: int = 64

    def __post_init__(self) -> None:
        _least(
            self, prompts=1, group=2, cache_tokens=1, step_tokens=1, page_tokens=1, max_sequences=1
        )
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature = {self.temperature}; a positive number")


class TrainConfig(_Strict, frozen=True, kw_only=True):
    """updates: of the weights a step, over equal parts of its prompts. micro_batch: sequences in one forward; 0: all.

    processes: masters and sequences are cut over so many (FSDP2). experts: neighbours of them that share the experts.
    tokens: neighbours that share a pack. packed: see adapters.fsdp.wrap. recompute: activation checkpointing.

    reuse_rollout_logprobs: take the engine's logprobs for those of the old policy, once `acceptance_steps` steps in
    a row had no unequal bit. The forward that computed them again is left out then; the training forward of the
    first update is still compared.
    """

    lr: float = 1e-3
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    updates: int = 1
    micro_batch: int = 0
    reuse_rollout_logprobs: bool = False
    acceptance_steps: int = 10
    processes: int = 1
    experts: int = 1
    tokens: int = 1
    packed: str = "resident"
    recompute: bool = False

    def __post_init__(self) -> None:
        _least(self, updates=1, micro_batch=0, acceptance_steps=1, processes=1, experts=1, tokens=1)
        for key in ("experts", "tokens"):
            if self.processes % getattr(self, key):
                raise ValueError(
                    f"{key} = {getattr(self, key)} does not divide processes = {self.processes}"
                )
        _one_of("packed", self.packed, PACKED)
        _between(self, 0.0, math.inf, "lr", "weight_decay")
        if not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm = {self.max_grad_norm}; above 0")


class LossConfig(_Strict, frozen=True, kw_only=True):
    """See `losses`. cap: of the correction's weight. kl_coef: of the k3 estimate against the policy after warm-up."""

    kind: str = "grpo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    correction: str = "none"
    cap: float = 2.0
    kl_coef: float = 0.0

    def __post_init__(self) -> None:
        _one_of("kind", self.kind, LOSSES)
        _one_of("correction", self.correction, CORRECTIONS)
        _between(self, 0.0, 1.0, "clip_low")
        _between(self, 0.0, math.inf, "clip_high", "cap", "kl_coef")


class Config(_Strict, frozen=True, kw_only=True):
    """One run. out: its folder, from the folder where the command runs.

    mode: "consistent", or "baseline", the same model file under plain torch operators (context.plain). check: what an
    unequal bit does; by default "stop", and "report" in a baseline. seed: of everything: the tiny model, prompts,
    demonstrations and draws are functions of it and of their step and place.
    """

    model: ModelConfig
    task: str
    out: str
    steps: int = 100
    seed: int = 0
    mode: str = "consistent"
    engine: str = "embedded"
    check: str = ""
    checkpoint_every: int = 10
    threads: int = 1
    warmup: WarmupConfig = WarmupConfig()
    rollout: RolloutConfig = RolloutConfig()
    train: TrainConfig = TrainConfig()
    loss: LossConfig = LossConfig()

    def __post_init__(self) -> None:
        _one_of("task", self.task, TASKS)
        _one_of("mode", self.mode, MODES)
        _one_of("engine", self.engine, ENGINES)
        if self.check:
            _one_of("check", self.check, CHECKS)
        if self.mode == "baseline" and self.check == "stop":
            raise ValueError("check = 'stop' with mode = 'baseline', whose bits differ by design")
        if self.mode == "baseline" and self.engine != "embedded":
            raise ValueError(
                f"engine = {self.engine!r} with mode = 'baseline'; only 'embedded' has plain operators"
            )
        if self.mode == "baseline" and self.train.processes > 1:
            raise ValueError(
                f"train.processes = {self.train.processes} with mode = 'baseline'; plain operators run in one"
            )
        _least(self, steps=1, checkpoint_every=1, threads=1)
        if not self.out:
            raise ValueError("out = ''; the folder of the run")
        if self.rollout.prompts % self.train.updates:
            raise ValueError(
                f"rollout.prompts = {self.rollout.prompts} is no multiple of train.updates = {self.train.updates}"
            )

    @property
    def checking(self) -> str:
        """What an unequal bit does: one of CHECKS."""
        return self.check or ("stop" if self.mode == "consistent" else "report")


def read_config(file: str | Path, changes: Iterable[tuple[str, Any]] = ()) -> Config:
    """The config in a TOML file. changes: (dotted key, value) pairs that replace what it says.

    Raises ValueError naming the file, the key and the value for what is unknown, missing, of a wrong type or out of
    range; OSError where there is no such file.
    """
    try:
        raw = tomllib.loads(Path(file).read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{file}: not TOML: {error}") from None
    for key, value in changes:
        table = raw
        *path, last = key.split(".")
        for name in path:
            table = table.setdefault(name, {})
            if not isinstance(table, dict):
                raise ValueError(f"{file}: {key} is set, but {name} is no table")
        table[last] = value
    return config_from(raw, str(file))


def config_from(raw: Mapping[str, Any], source: str) -> Config:
    """A checked config out of plain data; ValueError as in `read_config`."""
    try:
        return msgspec.convert(raw, Config)
    except msgspec.ValidationError as error:
        raise ValueError(f"{source}: {error}{_value_at(raw, str(error))}") from None


def differences(old: Config, new: Config) -> list[str]:
    """`key: old value, new value` of every key that a resumed run may not change and that did change."""
    a, b = (_flat(msgspec.to_builtins(config)) for config in (old, new))
    keys = [key for key in a | b if key not in FREE and a.get(key) != b.get(key)]
    return [f"{key}: {a.get(key)!r}, {b.get(key)!r}" for key in keys]


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        flat |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


def _value_at(raw: Any, error: str) -> str:
    """`, got ...` for the place that a message of msgspec names, where there is a value there."""
    found = re.search(r"at `\$\.([\w.]+)`$", error)
    if found is None:
        return ""
    value = raw
    for name in found[1].split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if isinstance(value, dict) else f", got {value!r}"
