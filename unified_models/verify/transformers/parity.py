"""What a comparison by tolerance found: logits and gradients, each within its bound or not."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

LOGITS = 5e-5  # largest |difference|, in standard deviations of the logits
GRADIENT = (1e-4, 1e-6)  # of a parameter's gradient, and of the largest one
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
