"""Against transformers' own class, in float32: logits and every parameter's gradient, within stated bounds.

transformers promises no bits, so this is the one comparison by tolerance: it shows that the two sides are the same
model. Where the model chooses (experts, entries), a choice within rounding of the cut would send the two elsewhere;
such tokens are drawn again.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from safetensors import safe_open
from torch import Tensor, nn

from unified_models.checkpoint import load, save
from unified_models.checkpoint.names import Names
from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.model import LanguageModel
from unified_models.verify.counters import cut_margins, select_scores
from unified_models.weight import Weight

LENGTHS = (1, 5, 80, 300)
LOGITS = 5e-5  # largest |difference|, in standard deviations of the logits
GRADIENT = (1e-4, 1e-6)  # of a parameter's gradient, and of the largest one
MARGIN = 1e-4  # of a score at the cut; float32 noise is some 1e-6
REDRAWN = 0.05  # of all tokens


@dataclass(frozen=True)
class Logits:
    """One sequence: max |difference| / std(logits)."""

    length: int
    difference: float

    @property
    def ok(self) -> bool:
        return self.difference <= LOGITS


@dataclass(frozen=True)
class Gradient:
    """One parameter: the norm of its gradient there, of the difference, and what that may be."""

    name: str
    norm: float
    difference: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.difference <= self.allowed


@dataclass
class Parity:
    """What was compared. redrawn: of `tokens`, those that were drawn again, since a choice was too close."""

    folder: str
    seed: int
    tokens: int = 0
    redrawn: int = 0
    logits: list[Logits] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)

    def problems(self) -> list[str]:
        """Everything that fails."""
        found = [
            f"logits at length {x.length}: {x.difference:.2e}, bound {LOGITS}"
            for x in self.logits
            if not x.ok
        ]
        found += [
            f"gradient of {x.name}: {x.difference:.2e} of {x.norm:.2e}, allowed {x.allowed:.2e}"
            for x in self.gradients
            if not x.ok
        ]
        if self.redrawn > REDRAWN * self.tokens:
            found.append(
                f"{self.redrawn} of {self.tokens} tokens drawn again, at most {REDRAWN:.0%} allowed"
            )
        if not self.logits or not self.gradients:
            found.append(f"{len(self.logits)} logits and {len(self.gradients)} gradients compared")
        return found

    @property
    def ok(self) -> bool:
        return not self.problems()

    @property
    def worst(self) -> tuple[float, float]:
        """Largest difference of logits, and of a gradient relative to its norm (among those above noise)."""
        floor = max((x.norm for x in self.gradients), default=0.0) * GRADIENT[1] / GRADIENT[0]
        relative = [x.difference / x.norm for x in self.gradients if x.norm > floor]
        return max((x.difference for x in self.logits), default=0.0), max(relative, default=0.0)

    def table(self) -> RenderableType:
        """For a terminal."""
        table = Table("length", "max |difference| / std", title="logits", title_justify="left")
        for one in self.logits:
            table.add_row(str(one.length), f"{one.difference:.2e}", style="" if one.ok else "red")
        worst = sorted(self.gradients, key=lambda x: -x.difference / x.allowed)[:5]
        grads = Table(
            "parameter",
            "norm",
            "difference",
            "allowed",
            title="gradients, worst five",
            title_justify="left",
        )
        for g in worst:
            row = (f"{g.norm:.2e}", f"{g.difference:.2e}", f"{g.allowed:.2e}")
            grads.add_row(g.name, *row, style="" if g.ok else "red")
        logits, gradient = self.worst
        text = (
            f"{self.folder} against transformers: logits within {logits:.2e}, {len(self.gradients)} gradients within "
            f"{gradient:.2e}, {self.redrawn} of {self.tokens} tokens drawn again"
        )
        lines = [Text(line, style="red") for line in self.problems()[:20]]
        return Group(table, grads, *lines, Text(text, style="green" if self.ok else "bold red"))

    def as_dict(self) -> dict[str, Any]:
        """What `to_json` writes."""
        logits, gradient = self.worst
        return {
            "ok": self.ok,
            "problems": self.problems(),
            "worst_logits": logits,
            "worst_gradient": gradient,
        } | asdict(self)

    def to_json(self) -> str:
        """All of it."""
        return json.dumps(self.as_dict(), indent=1)


def against_transformers(
    folder: str | Path, *, lengths: Sequence[int] = LENGTHS, seed: int = 0
) -> Parity:
    """Compare a checkpoint, both sides in float32 from the same values, with the class that transformers has for it.

    Logits: random sequences of `lengths`. Gradients: of one random linear functional of the log-probabilities of the
    longest sequence, for every parameter that has one here.

    Raises ValueError where transformers is not installed.
    """
    library = _transformers()
    model = load(folder, numerics="float32", progress=False)
    generator = torch.Generator().manual_seed(seed)
    parity = Parity(str(folder), seed)
    with tempfile.TemporaryDirectory() as temporary, _quiet(library):
        theirs = _theirs(library, model, Path(temporary) / "float32")
        for length in sorted(lengths):
            ids = draw(model, length, Random(f"{seed} {length}"), parity)
            mine = our_logits(model, ids)
            other = theirs(ids[None], use_cache=False).logits[0]
            difference = (mine - other).abs().max() / other.std()
            parity.logits.append(Logits(length, float(difference.detach())))
        weights = torch.randn(mine.shape, generator=generator)
        for logits in (mine, other):
            (torch.log_softmax(logits, -1) * weights).sum().backward()
        wanted = their_gradients(theirs, Names.of(model), Path(temporary) / "gradients")
        parity.gradients = compare_gradients(our_gradients(model), wanted)
    return parity


def _transformers() -> Any:
    """transformers, or one clear line."""
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "transformers is not installed; pip install 'unified_models[transformers]'"
        ) from None
    return transformers


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without its progress bars."""
    bars = transformers.utils.logging
    shown = bars.is_progress_bar_enabled()
    bars.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            bars.enable_progress_bar()


def _theirs(transformers: Any, model: LanguageModel, folder: Path) -> nn.Module:
    """Their model of the same values, through a checkpoint of float32 masters."""
    save(model, folder, masters=True)
    path = folder / "config.json"
    path.write_text(json.dumps(their_config(json.loads(path.read_text()))))
    kind = transformers.AutoModelForCausalLM
    theirs, info = kind.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    left = {key: sorted(names) for key, names in info.items() if names}
    if left:
        raise ValueError(f"{folder}: transformers did not load the checkpoint whole: {left}")
    return theirs.eval()  # type: ignore[no-any-return]


def their_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that transformers reads as float32: no quantisation, and its own spelling of what the released
    form cannot say there, entries of another stride than 4 and 128."""
    raw = {
        key: value
        for key, value in raw.items()
        if key not in ("quantization_config", "expert_dtype")
    }
    ratios = raw.get("compress_ratios", ())[: raw["num_hidden_layers"]]
    wide = {ratio for ratio in ratios if ratio not in (0, 4)}
    if wide <= {128}:
        return raw
    if len(wide) > 1:
        raise ValueError(
            f"compress_ratios: transformers has one heavily compressed ratio, not {sorted(wide)}"
        )
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention"}
    del raw["compress_ratios"]
    rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": wide.pop()}
    return raw | {
        "layer_types": [kinds.get(ratio, "heavily_compressed_attention") for ratio in ratios],
        "compress_rates": rates,
    }


def our_logits(model: LanguageModel, ids: Tensor) -> Tensor:
    """[T, V], with their graph."""
    ctx = LocalContext(Step.of([len(ids)]))
    return model.logits(model(ids, ctx), ctx)


def draw(model: LanguageModel, length: int, random: Random, parity: Parity) -> Tensor:
    """Random ids, int64 [length]; the first token whose choice is within MARGIN of the cut is drawn again, until there
    is none. Each token's choice depends on what comes before it only."""
    vocab = model.config.vocab_size
    ids = torch.tensor([random.randrange(vocab) for _ in range(length)])
    parity.tokens += length
    for _ in range(length):
        close = (margins(model, ids) < MARGIN).nonzero()
        if not len(close):
            break
        ids[int(close[0])] = random.randrange(vocab)
        parity.redrawn += 1
    return ids


@torch.no_grad()
def margins(model: LanguageModel, ids: Tensor) -> Tensor:
    """The least margin at the cut of each token's choices, [T]."""
    least = torch.full((len(ids),), torch.inf)

    def look(_site: nn.Module, name: str, value: tuple[Tensor, ...]) -> None:
        nonlocal least
        if name == "choose":
            least = torch.minimum(least, cut_margins(value[0], value[1].shape[-1]))
        elif name == "select" and int(value[4].max()):
            *args, picks_TK = value
            scores_TN = select_scores(args[0], args[1], args[2], args[3], args[4])
            least = torch.minimum(least, cut_margins(scores_TN, picks_TK.shape[-1]))

    model(ids, LocalContext(Step.of([len(ids)]), onlooker=look))
    return least


def our_gradients(model: LanguageModel) -> dict[str, Tensor]:
    """By checkpoint name; without those that are frozen."""
    found = {}
    for part in Names.of(model).parts:
        if (
            isinstance(part.owner, Weight)
            and part.owner.master is not None
            and not part.owner.frozen
        ):
            grad = part.owner.master.grad
            assert grad is not None, f"{part.path}: no gradient"
            found[part.name] = grad if part.index is None else grad[part.index]
    return found


@torch.no_grad()
def their_gradients(theirs: Any, names: Names, folder: Path) -> dict[str, Tensor]:
    """By checkpoint name: transformers itself writes them, in the place of its parameters, in a spelling that we
    read."""
    for parameter in theirs.parameters():
        grad = parameter.grad
        parameter.data = torch.zeros_like(parameter) if grad is None else grad
    theirs.save_pretrained(folder)
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.offset_keys():
                found[names.by_name[name].name] = tensors.get_tensor(name)
    return found


def compare_gradients(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> list[Gradient]:
    """||g - g_ref|| <= 1e-4 ||g_ref|| + 1e-6 max_p ||g_ref,p|| for every parameter; ValueError where a name has no
    counterpart."""
    missing = sorted(set(ours) - set(theirs))
    if missing:
        raise ValueError(
            f"transformers has no gradient of {len(missing)}: {', '.join(missing[:5])}"
        )
    norms = {name: float(theirs[name].double().norm()) for name in ours}
    floor = GRADIENT[1] * max(norms.values())
    found = []
    for name, grad in ours.items():
        difference = float((grad.double() - theirs[name].double()).norm())
        found.append(Gradient(name, norms[name], difference, GRADIENT[0] * norms[name] + floor))
    return found
