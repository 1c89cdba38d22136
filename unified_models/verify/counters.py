"""What a verification met on its way: the rare cases that must have happened for equal bits to mean much."""

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from unified_models.context.interface import Experts
from unified_models.context.slots import Entries
from unified_models.context.step import Step
from unified_models.engine import Stats
from unified_models.model import LanguageModel
from unified_models.ops.blocks import whole
from unified_models.ops.select import scores

TIE_ROWS = 64  # of one `select`; its scores are computed once more to see ties


@dataclass
class Counters:
    """Counts over all runs, the reference included.

    updates: of weights, while requests ran. windows_inside, windows_across: windows of compressed entries whose own
    tokens all came in the step that closed them, or in several. queries_below, queries_above: tokens with fewer, or
    with more, entries than a query reads. select_ties, choose_ties: choices whose last taken and first left score
    were equal. experts_N: experts that got exactly N rows in one step.
    """

    preemptions: int = 0
    updates: int = 0
    prefix_hits: int = 0
    mixed_steps: int = 0
    windows_inside: int = 0
    windows_across: int = 0
    queries_below: int = 0
    queries_above: int = 0
    select_ties: int = 0
    choose_ties: int = 0
    experts_1: int = 0
    experts_17: int = 0
    experts_64: int = 0

    def add_stats(self, stats: Stats) -> None:
        """What an engine counted, once it has finished."""
        self.preemptions += stats.preemptions
        self.updates += stats.updates
        self.prefix_hits += stats.prefix_hits
        self.mixed_steps += stats.mixed_steps

    def add_step(self, step: Step, strides: Iterable[int]) -> None:
        """The windows that close in a step, for each stride of the model's entries."""
        for stride in strides:
            for past, length in zip(step.past, step.lengths, strict=True):
                closing = (past + length) // stride - past // stride
                across = int(closing > 0 and past % stride > 0)
                self.windows_across += across
                self.windows_inside += closing - across

    def add_note(self, name: str, value: Any) -> None:
        """A note of a context: see LocalContext."""
        if name == "select":
            self._add_select(*value)
        elif name == "choose":
            scores_TE, ids_TK = value
            self.choose_ties += cut_ties(scores_TE, ids_TK.shape[-1])
        elif name == "expert_rows":
            self.experts_1 += int((value == 1).sum())
            self.experts_17 += int((value == 17).sum())
            self.experts_64 += int((value == 64).sum())

    def _add_select(
        self,
        q_TJI: Tensor,
        weights_TJ: Tensor,
        rows_RI: Tensor,
        base_T: Tensor,
        count_T: Tensor,
        picks_TK: Tensor,
    ) -> None:
        k = picks_TK.shape[-1]
        self.queries_below += int((count_T < k).sum())
        above = (count_T > k).nonzero()[:, 0]
        self.queries_above += len(above)
        above = above[-TIE_ROWS:]
        if len(above):
            args = (q_TJI[above], weights_TJ[above], rows_RI, base_T[above], count_T[above])
            self.select_ties += cut_ties(select_scores(*args), k)


def select_scores(
    q_TJI: Tensor, weights_TJ: Tensor, rows_RI: Tensor, base_T: Tensor, count_T: Tensor
) -> Tensor:
    """[T, N]: what `select` orders, for the entries that each token sees; -inf elsewhere."""
    columns = torch.arange(whole(int(count_T.max())), device=count_T.device)
    seen = columns < count_T[:, None]
    index = torch.where(seen, base_T[:, None] + columns, -1)
    scores_TN = scores(q_TJI, weights_TJ, rows_RI, index)
    return scores_TN.masked_fill(~seen | scores_TN.isnan(), -torch.inf)


def cut_margins(scores_TN: Tensor, k: int) -> Tensor:
    """How far the k-th highest score of each row is above the next one; 0 is a tie at the cut. [T]; inf where no
    more than k scores are finite."""
    if scores_TN.shape[-1] <= k:
        return scores_TN.new_full(scores_TN.shape[:1], torch.inf)
    ordered = scores_TN.sort(-1, descending=True).values
    margins = ordered[:, k - 1] - ordered[:, k]
    return margins.masked_fill(~ordered[:, k].isfinite(), torch.inf)


def cut_ties(scores_TN: Tensor, k: int) -> int:
    """Rows whose k-th and next highest scores are equal."""
    return int((cut_margins(scores_TN, k) == 0).sum())


def strides(model: LanguageModel) -> list[int]:
    """Of all entries that the model keeps, ascending."""
    return sorted({slot.stride for slot in model.slots().values() if isinstance(slot, Entries)})


def unmet(counters: Counters, model: LanguageModel, notes: Iterable[str]) -> list[str]:
    """Names of counters that are 0 though the model has what they count. notes: the names it was seen to give."""
    notes = set(notes)
    absent = set()
    if not strides(model):
        absent |= {"windows_inside", "windows_across"}
    if "select" not in notes:
        absent |= {"queries_below", "queries_above", "select_ties"}
    if "choose" not in notes:
        absent |= {"choose_ties"}
    if not any(isinstance(module, Experts) for module in model.modules()):
        absent |= {"experts_1", "experts_17", "experts_64"}
    return [
        f.name for f in fields(counters) if f.name not in absent and not getattr(counters, f.name)
    ]
