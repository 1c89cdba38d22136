"""Sequences without close choices: where the cut is within rounding, two right implementations may part."""

from random import Random

import torch
from torch import Tensor, nn

from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.model import LanguageModel
from unified_models.verify.counters import cut_margins, select_scores
from unified_models.verify.transformers.parity import Parity

MARGIN = 1e-4  # of a score at the cut; float32 noise is some 1e-6


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
