"""Loading a checkpoint folder: everything is checked from headers, then masters are filled one tensor at a time."""

import json
import resource
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from unified_models import registry
from unified_models.checkpoint.changes import Change, told
from unified_models.checkpoint.config_files import CONFIG, read_config
from unified_models.checkpoint.divisor import settle_divisor
from unified_models.checkpoint.fill import Filler
from unified_models.checkpoint.match import FORMATS_KEY, Match, Source, match
from unified_models.checkpoint.names import Names, Part
from unified_models.checkpoint.shards import Shards, few, open_shards, some
from unified_models.context.parallel import hold_experts
from unified_models.model import LanguageModel, bind_numerics
from unified_models.weight import Weight

WEIGHTS = ("master", "packed", "file")


@dataclass(frozen=True)
class LoadReport:
    """What a load did, beyond what was asked.

    skipped: tensor -> reason, by rule. stray: files of the folder that were not read. unlisted: tensors that the index
    does not name. widened: float32-compute parameters that the file holds in 16 bits. changed: tensors whose packed
    values are not the file's. defaults: what was assumed of tensors that the checkpoint lacks, a line for each value.
    notes: tensors that it holds otherwise than a pattern of config.json implies, one a line. read_bytes: of tensors.
    peak_bytes: the most memory this process ever held, mapped file pages included.
    """

    skipped: dict[str, str]
    stray: tuple[str, ...]
    unlisted: tuple[str, ...]
    widened: tuple[str, ...]
    changed: tuple[Change, ...]
    defaults: tuple[str, ...]
    notes: tuple[str, ...]
    tensors: int
    read_bytes: int
    seconds: float
    peak_bytes: int

    def __str__(self) -> str:
        lines = [
            f"{self.tensors} tensors, {self.read_bytes / 1e9:.2f} GB in {self.seconds:.1f} s, "
            f"peak memory {self.peak_bytes / 1e9:.2f} GB"
        ]
        if self.skipped:
            lines.append(
                f"{len(self.skipped)} skipped by rule: {', '.join(set(self.skipped.values()))}"
            )
        lines += [*self.defaults, *few(self.notes)]
        lines += [f"not read: {name}" for name in (*self.stray, *self.unlisted)]
        lines += [f"float32 parameter stored in 16 bits: {name}" for name in self.widened]
        lines += [f"re-packed with other values: {line}" for line in told(self.changed)]
        return "\n".join(lines)


def load(
    folder: str | Path,
    *,
    device: str | torch.device = "cpu",
    numerics: str = "deployed",
    weights: str = "master",
    progress: bool = True,
    ignore_index: bool = False,
    experts: tuple[int, int] = (0, 1),
) -> LanguageModel:
    """The model of a checkpoint folder, committed and ready to run; `model.load_report` says what happened.

    Args:
        numerics: "deployed" runs the checkpoint's formats: master = bf16(dequantised file value) and packed =
            pack(master). "float32" quantises nothing: master = dequantised file value.
        weights: "master" as above. "packed" keeps the same packed bytes and no masters, for serving. "file" keeps the
            file's own packed bytes and no masters, for serving what was released, with other bits.
        progress: show a bar when loading takes more than two seconds, on a terminal.
        ignore_index: read every *.safetensors of the folder, whatever the index says.
        experts: (rank, size): of each stack of experts, hold the rank-th of `size` equal stretches (`Parallel`).

    Raises ValueError naming the file, the tensor or the argument and both values; everything that headers can tell is
    checked before any tensor is read.
    """
    if weights not in WEIGHTS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHTS)}, got {weights!r}")
    if weights == "file" and numerics != "deployed":
        raise ValueError(
            f"weights='file' serves the checkpoint's formats; numerics is {numerics!r}"
        )
    start = time.perf_counter()
    folder = Path(folder)
    model = build(folder)
    hold_experts(model, *experts)
    shards = open_shards(folder, ignore_index)
    found = match_folder(Names.of(model), shards)
    filler = fill(model, shards, found, device, numerics, weights, progress)
    shards.close()
    model.to(device)
    model.load_report = LoadReport(
        skipped=found.skipped,
        stray=shards.stray,
        unlisted=shards.unlisted,
        widened=tuple(s.tensor.name for s in found.sources if _widened(s)),
        changed=tuple(filler.changed),
        defaults=tuple(absent(found.defaulted)),
        notes=tuple(found.notes),
        tensors=len(found.sources),
        read_bytes=sum(source.size for source in found.sources),
        seconds=time.perf_counter() - start,
        peak_bytes=_peak_bytes(),
    )
    return model


def fill(
    model: LanguageModel,
    shards: Shards,
    found: Match,
    device: str | torch.device,
    numerics: str,
    weights: str,
    progress: bool,
) -> Filler:
    """Give a built model the formats and values that were found for it. ValueError, before anything changes, where
    they do not fit."""
    if problems := found.problems():
        listed = "\n  ".join(problems)
        raise ValueError(
            f"{shards.folder}: the checkpoint does not fit {name_of(model)}\n  {listed}"
        )
    check_same(found, shards)
    settle_divisor(found, shards)
    bind_formats(model, found)
    bind_numerics(model, numerics)
    model.weights_from = "file" if weights == "file" else "master"
    filler = Filler(shards, torch.device(device), weights)
    filler.fill(found.sources, progress)
    filler.use_defaults(found.defaulted)
    return filler


def check_same(found: Match, shards: Shards) -> None:
    """ValueError: a tensor that the model takes from another one has other values than that one."""
    for name, other in found.same.items():
        a, b = shards.read(name), shards.read(other)
        if a.shape != b.shape or not torch.equal(a.float(), b.float()):
            raise ValueError(
                f"{shards.folder}: {name} and {other} must be one tensor, as config.json says, and differ"
            )


def build(folder: Path) -> LanguageModel:
    """The model that config.json describes, its storage allocated and not yet touched."""
    module, raw = architecture(folder)
    model: LanguageModel = module.Model(module.Config.from_json(raw, source=str(folder / CONFIG)))
    model.name_parts()
    return model


def name_of(model: LanguageModel) -> str:
    """The architecture: the name of its file."""
    return model.file().rpartition(".")[2]


def architecture(folder: Path) -> tuple[ModuleType, dict[str, Any]]:
    """The model file that a folder's config.json names, and the JSON."""
    path = folder / CONFIG
    raw = read_config(folder)
    if "model_type" not in raw:
        raise ValueError(f"{path}: missing key 'model_type'")
    try:
        return registry.find(raw["model_type"]), raw
    except ValueError as error:
        raise ValueError(f"{path}: model_type: {error}") from None


def match_folder(names: Names, shards: Shards) -> Match:
    """`match`, with what the headers say of masters."""
    formats: dict[str, str] = {}
    for file, metadata in zip(shards.files, shards.metadata, strict=True):
        try:
            formats |= json.loads(metadata.get(FORMATS_KEY, "{}"))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{shards.folder / file}: metadata {FORMATS_KEY!r}: {error}") from None
    return match(names, shards, formats)


def bind_formats(model: LanguageModel, found: Match) -> None:
    """Give every weight the format that the file holds."""
    for path, weight in model.weights():
        if path in found.formats:
            weight.stored = found.formats[path]
            weight.bind(weight.stored.name)
    model.name_parts()


def absent(parts: Sequence[Part]) -> Iterator[str]:
    """One line for each value that tensors have which a checkpoint lacks, with their names."""
    names: dict[float, list[str]] = {}
    for part in parts:
        assert isinstance(part.owner, Weight) and part.owner.default is not None
        names.setdefault(part.owner.default, []).append(part.name)
    for value, lacking in names.items():
        yield f"{value} for {len(lacking)} tensors that are not there: {some(lacking, len(lacking))}"


def _peak_bytes() -> int:
    """The high-water mark of this process. Linux's getrusage also counts what its parent held before exec."""
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _widened(source: Source) -> bool:
    owner = source.part.owner
    return isinstance(owner, Weight) and owner.exact and source.tensor.dtype != "F32"
