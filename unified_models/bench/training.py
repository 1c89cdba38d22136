"""Tokens a second of training on a GPU: our model beside transformers' class of the same config.json, both random.

`python -m unified_models.bench.training ours|transformers CONFIG [KEY=VALUE ...]` runs one side and ends with one line
of JSON; `both` runs each side twice, in processes of their own, and shows a table. KEY is of config.json, or of
`Options` behind a dot: `hybrid_override_pattern=MEM*EME num_hidden_layers=7 .tokens=16384 .profile=true`.
"""

import gc
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from unified_models import registry
from unified_models.arguments import assignments
from unified_models.bench.clock import seconds_of
from unified_models.bench.profiled import by_time
from unified_models.checkpoint.implied import bind_implied
from unified_models.config import load_json
from unified_models.model import LanguageModel, bind_numerics
from unified_models.tiny import distinct, rule
from unified_models.training import ROWS, logprobs
from unified_models.verify.transformers.theirs import TRANSLATIONS, installed
from unified_models.verify.transformers.translation import Translation

FAILED, REFUSED = 1, 2
ORDER = ("transformers", "ours", "ours", "transformers")
WARM = 2
"""Runs before the first that counts."""
PACKAGES = ("torch", "transformers", "triton", "mamba_ssm", "causal_conv1d", "flash_attn")
NOT_THEIRS = ("auto_map", "quantization_config")
"""Keys of a config.json that would make transformers look for files, or quantise."""
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "USE_HUB_KERNELS": "NO"}
"""transformers takes kernels that are installed, and asks no hub for others."""
MASTERS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
VALUES: dict[str, tuple[float, float]] = {
    "norm": (1, 0),
    "bias": (0, 0.02),
    "score_bias": (0, 0),
    "dt_bias": (-3.5, 1),
    "A_log": (0.5, 0.7),
    "input_scale": (0.012, 0),
    "cache_scale": (0.01, 0),
    "matrix": (0, 0.02),
    "vocab": (0, 0.02),
}
"""Mean and deviation of each kind of weight, as transformers begins: a router sends equally many tokens to each expert,
about."""
NUMBERS = {
    "forward_tokens_per_second": "forward, tokens",
    "forward_backward_tokens_per_second": "and backward, tokens",
    "forward_peak_gib": "forward, peak GiB",
    "forward_backward_peak_gib": "and backward, peak GiB",
}


@dataclass(frozen=True)
class Options:
    """What is run. tokens: of the pack, in equal `sequences`. repeats: of each measurement. profile: show where the
    time of a step goes. checkpoint: recompute activations, block by block. masters: dtype of our trained parameters and
    their gradients. rows: of our logits, at once. attention, experts: transformers' implementations; empty: the
    fastest that is installed."""

    tokens: int = 16384
    sequences: int = 1
    repeats: int = 5
    profile: bool = False
    checkpoint: bool = False
    masters: str = "bfloat16"
    rows: int = ROWS
    attention: str = ""
    experts: str = ""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("sequences", "repeats", "rows"):
            if (value := getattr(self, name)) < 1:
                raise ValueError(f".{name} = {value}; at least 1")
        pack = f".tokens = {self.tokens} in .sequences = {self.sequences}"
        if self.tokens % self.sequences:
            raise ValueError(f"{pack}: not in equal parts")
        if self.tokens < 2 * self.sequences:
            raise ValueError(f"{pack}; at least 2 tokens each")
        if self.masters not in MASTERS:
            raise ValueError(f".masters = {self.masters!r}; known: {', '.join(MASTERS)}")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "Options":
        """Of names and values that someone typed; ValueError for those that are not there."""
        known = {field.name: field.default for field in fields(cls)}
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"unknown option .{name}; known: .{', .'.join(known)}")
            wanted = type(known[name])
            if type(value) is not wanted:
                raise ValueError(f".{name} = {value!r}; expected {wanted.__name__}")
        return cls(**given)


@dataclass(frozen=True)
class Task:
    """A config.json, its source for errors, and what is run of it."""

    raw: dict[str, Any]
    source: str
    options: Options

    @classmethod
    def of(cls, side: str, file: Path, texts: Sequence[str]) -> "Task":
        """ValueError for whatever is wrong with what was typed, or with the config."""
        given = dict(assignments(list(texts)))
        options = Options.of({k[1:]: v for k, v in given.items() if k.startswith(".")})
        changes = {k: v for k, v in given.items() if not k.startswith(".")}
        task = cls(load_json(file) | changes, str(file), options)
        task.config()
        if side != "ours":
            installed()
            if options.sequences > 1:
                raise ValueError(
                    f".sequences = {options.sequences}: transformers' class takes no packs of several sequences "
                    "without kernels that are told where each begins; run side `ours` alone"
                )
        return task

    def config(self) -> Any:
        """Ours. ValueError for a file that no architecture reads."""
        name = self.raw.get("model_type")
        if not isinstance(name, str):
            raise ValueError(f"{self.source}: missing key 'model_type'")
        return registry.find(name).Config.from_json(self.raw, self.source)

    def sequences(self) -> list[list[int]]:
        """Random token ids, the same on both sides."""
        size = (self.options.sequences, self.options.tokens // self.options.sequences)
        generator = torch.Generator().manual_seed(self.options.seed)
        ids_ST = torch.randint(self.config().vocab_size, size, generator=generator)
        return ids_ST.tolist()


@dataclass(frozen=True)
class Side:
    """A model to train. loss: float32 [], mean over the pack of what each next token costs, with its graph. told: what
    a reader should know of it."""

    model: nn.Module
    loss: Callable[[], Tensor]
    told: dict[str, Any]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    @torch.no_grad()
    def forward(self) -> Tensor:
        """The loss alone."""
        return self.loss()

    def step(self) -> None:
        """The loss, and its gradients in .grad of all that is trained."""
        self.loss().backward()

    def clear(self) -> None:
        """Before each run, off the clock."""
        for parameter in self.model.parameters():
            parameter.grad = None
        gc.collect()


def ours(task: Task, device: torch.device) -> Side:
    """Our model, drawn on the device, in the formats that config.json states."""
    options, sequences = task.options, task.sequences()
    with device:
        model: LanguageModel = registry.find(task.raw["model_type"]).Model(task.config())
        bind_implied(model)
    model.name_parts()
    bind_numerics(model, "deployed")
    model.to(device)
    fill(model, torch.Generator(device).manual_seed(options.seed))
    model.to(MASTERS[options.masters])
    model.commit()

    def loss() -> Tensor:
        lps = logprobs(model, sequences, recompute=options.checkpoint, rows=options.rows)
        return -torch.cat(lps).mean()

    return Side(model, loss, {"layers": len(model.blocks), "masters": options.masters})


@torch.no_grad()
def fill(model: LanguageModel, generator: torch.Generator) -> None:
    """Random masters and tables, drawn where they are. No commit."""
    for path, weight in model.weights():
        assert weight.master is not None, f"{path}: nothing to fill"
        center, deviation = VALUES[weight.init or rule(weight)]
        weight.master.normal_(center, deviation, generator=generator)
    for _, table in model.tables():
        table.data.copy_(distinct(table, generator))


def theirs(task: Task, device: torch.device) -> Side:
    """transformers' class in bfloat16, as it initialises itself; its own loss, of labels."""
    library, options = installed(), task.options
    translation = TRANSLATIONS.get(task.raw["model_type"], Translation())
    raw = translation.config({k: v for k, v in task.raw.items() if k not in NOT_THEIRS})
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(raw))
        config = library.AutoConfig.from_pretrained(folder)
    flash = library.utils.is_flash_attn_2_available()
    chosen = {
        "attn_implementation": options.attention or ("flash_attention_2" if flash else "sdpa")
    }
    if options.experts:
        chosen["experts_implementation"] = options.experts
    with device:
        model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **chosen)
    translation.prepare(model)
    model.to(device).train()
    if options.checkpoint:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ids = torch.tensor(task.sequences(), device=device)

    def loss() -> Tensor:
        value: Tensor = model(input_ids=ids, labels=ids, use_cache=False).loss
        return value

    told = {
        "layers": model.config.num_hidden_layers,
        "class": type(model).__name__,
        "attention": model.config._attn_implementation,
        "experts": model.config._experts_implementation,
        "kernels": kernels(vars(sys.modules[type(model).__module__])),
    }
    return Side(model, loss, told)


def kernels(names: Mapping[str, Any]) -> dict[str, str]:
    """Of a modeling file's functions that a package may replace: the package's module that each runs, or torch."""
    found = {}
    for name, function in names.items():
        if inspect.isfunction(function):
            taken = inspect.getclosurevars(function).nonlocals.get("implementation")
            if callable(taken):
                where = str(taken.__module__)
                found[name] = "torch" if where.startswith("transformers.") else where
    return found


SIDES = {"ours": ours, "transformers": theirs}


def run(side: str, task: Task, told: dict[str, Any]) -> None:
    """Add to `told` everything of one side; "error" instead of the numbers that memory did not suffice for."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    told |= {"side": side, "config": task.source, "device": device.type}
    if device.type == "cuda":
        told["device"] = torch.cuda.get_device_name(device)
    told |= {package: release(package) for package in PACKAGES}
    told |= {name: getattr(task.options, name) for name in ("tokens", "sequences", "checkpoint")}
    try:
        measure(SIDES[side](task, device), task.options, device, told)
    except torch.OutOfMemoryError as error:
        told["error"] = f"out of memory: {str(error).splitlines()[0]}"
        print(f"{side}: {told['error']}", file=sys.stderr)


def measure(side: Side, options: Options, device: torch.device, told: dict[str, Any]) -> None:
    """Add to `told` what is found, as it is found."""
    told |= side.told
    told["parameters"] = sum(p.numel() for p in side.trained)
    for name, work in (("forward", side.forward), ("forward_backward", side.step)):
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        times = []
        for _ in range(WARM + options.repeats):
            side.clear()
            times.append(milliseconds(work, device))
        told[f"{name}_milliseconds"] = [round(each, 3) for each in times[WARM:]]
        told[f"{name}_tokens_per_second"] = round(options.tokens / median(times[WARM:]) * 1e3, 1)
        told[f"{name}_peak_gib"] = None
        if device.type == "cuda":
            told[f"{name}_peak_gib"] = round(torch.cuda.max_memory_allocated(device) / 2**30, 2)
    told["gradients"] = sum(p.grad.numel() for p in side.trained if p.grad is not None)
    side.clear()
    told["loss"] = float(side.forward())
    if options.profile:
        print(profiled(side, device), flush=True)


def milliseconds(work: Callable[[], object], device: torch.device) -> float:
    """Of one call: by the device's clock, from the first kernel to the last, or by that on the wall."""
    if device.type != "cuda":
        return seconds_of(work) * 1e3
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    began.record()
    work()
    ended.record()
    torch.cuda.synchronize(device)
    return float(began.elapsed_time(ended))


def profiled(side: Side, device: torch.device) -> str:
    """Kernels of one forward and backward by the time that they take, as torch's profiler counts them."""
    from torch.profiler import ProfilerActivity, profile

    gpu = device.type == "cuda"
    side.clear()
    with profile(activities=[ProfilerActivity.CUDA if gpu else ProfilerActivity.CPU]) as known:
        whole = milliseconds(side.step, device)
    busy, lines = by_time(known, on_gpu=gpu)
    told = f"forward and backward: {whole:.2f} ms while profiled, kernels {busy:.2f} ms"
    return "\n".join([told, *lines])


def release(package: str) -> str | None:
    """Of an installed package; None: it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown" if find_spec(package) else None


def both(task: Task, file: Path, texts: Sequence[str]) -> int:
    """Ours beside transformers', one process after the other: what each told, and a table. 1: a side failed."""
    told: dict[str, list[dict[str, Any]]] = {"transformers": [], "ours": []}
    failed = 0
    for side in ORDER:
        command = [sys.executable, "-m", "unified_models.bench.training", side, str(file), *texts]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        print(ran.stdout, end="", flush=True)
        if ran.returncode:
            failed = FAILED
            Console(stderr=True).print(f"{side}: exit status {ran.returncode}", style="red")
        told[side] += [json.loads(line) for line in ran.stdout.splitlines()[-1:]]
    Console().print(
        table(told, f"tokens a second of training, {task.options.tokens:,} at once, {file}")
    )
    return failed


def table(told: Mapping[str, Sequence[Mapping[str, Any]]], title: str) -> Table:
    """Every number of every run, and the ratio of the medians; a dash where a run has none."""
    shown = Table("", *told, "ours / transformers", title=title)
    for key, header in NUMBERS.items():
        values = {side: [each.get(key) for each in tolds] for side, tolds in told.items()}
        cells = [
            " ".join("-" if v is None else f"{v:,.0f}" if v >= 1000 else f"{v:,.2f}" for v in each)
            for each in values.values()
        ]
        there = {side: [v for v in each if v is not None] for side, each in values.items()}
        ratio = "-"
        if all(there.values()):
            ratio = f"{median(there['ours']) / median(there['transformers']):.2f}"
        shown.add_row(header, *cells, ratio)
    return shown


def main(arguments: Sequence[str]) -> int:
    """SIDE CONFIG [KEY=VALUE ...], or both CONFIG [KEY=VALUE ...]. 1: a side failed; 2: refused."""
    try:
        if len(arguments) < 2 or arguments[0] not in (*SIDES, "both"):
            raise ValueError(f"expected {'|'.join(SIDES)}|both CONFIG [KEY=VALUE ...]")
        side, file, *texts = arguments
        task = Task.of(side, Path(file), texts)
    except ValueError as error:
        print(error, file=sys.stderr)
        return REFUSED
    if side == "both":
        return both(task, Path(file), texts)
    told = dict[str, Any]()
    try:
        run(side, task, told)
    finally:  # also what was found before something failed
        print(json.dumps(told), flush=True)
    return FAILED if "error" in told else 0


if __name__ == "__main__":
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    sys.exit(main(sys.argv[1:]))
