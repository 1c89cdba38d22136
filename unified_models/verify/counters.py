"""What a verification met on its way: the rare cases that must have happened for equal bits to mean much."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from unified_models.context.interface import Experts
from unified_models.context.slots import Entries, State
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
    tokens all came in the step that closed them, or in several; folds_inside, folds_across: the same of a scan's
    chunks. state_hits: sequences that went on from a scan state found in memory. preempted_open: sequences that gave
    way amid a chunk. waited_for_state: see Stats. queries_below, queries_above: tokens with fewer, or with more,
    entries than a query reads. select_ties, choose_ties: choices whose last taken and first left score were equal.
    experts_N: experts that got exactly N rows in one step.
    """

    preemptions: int = 0
    updates: int = 0
    prefix_hits: int = 0
    mixed_steps: int = 0
    folds_inside: int = 0
    folds_across: int = 0
    state_hits: int = 0
    preempted_open: int = 0
    waited_for_state: int = 0
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
        self.waited_for_state += stats.waited_for_state

    def add_step(self, step: Step, strides: Iterable[int], chunks: Iterable[int]) -> None:
        """The windows and chunks that fill up in a step, for each stride of the model's entries and each of its chunk
        lengths."""
        for stride in strides:
            inside, across = filled(step, stride)
            self.windows_inside += inside
            self.windows_across += across
        for chunk in chunks:
            inside, across = filled(step, chunk)
            self.folds_inside += inside
            self.folds_across += across

    def without(self, names: Iterable[str]) -> dict[str, int]:
        """All counts but these, by name."""
        left_out = set(names)
        return {name: count for name, count in asdict(self).items() if name not in left_out}

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


def filled(step: Step, tokens: int) -> tuple[int, int]:
    """How many stretches of `tokens` tokens fill up in a step: all of them new, and some of them from earlier steps."""
    inside = across = 0
    for past, length in zip(step.past, step.lengths, strict=True):
        full = (past + length) // tokens - past // tokens
        begun = int(full > 0 and past % tokens > 0)
        across += begun
        inside += full - begun
    return inside, across


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


def chunks(model: LanguageModel) -> list[int]:
    """Lengths of the chunks of all scans of the model, ascending."""
    return sorted({slot.chunk for slot in model.slots().values() if isinstance(slot, State)})


def absent(model: LanguageModel, notes: Iterable[str]) -> set[str]:
    """Names of counters of what the model has not. notes: the names of what it was seen to show to an onlooker."""
    notes = set(notes)
    names: set[str] = set()
    if not strides(model):
        names |= {"windows_inside", "windows_across"}
    if not chunks(model):
        names |= {"folds_inside", "folds_across"}
        names |= {"state_hits", "preempted_open", "waited_for_state"}
    if "select" not in notes:
        names |= {"queries_below", "queries_above", "select_ties"}
    if "choose" not in notes:
        names |= {"choose_ties"}
    if not any(isinstance(module, Experts) for module in model.modules()):
        names |= {"experts_1", "experts_17", "experts_64"}
    return names
