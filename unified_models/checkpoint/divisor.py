"""Which of its two rules packed the NVFP4 tensors of a checkpoint. No file says it, but its block scales do."""

from collections.abc import Iterable
from dataclasses import replace

import torch

from unified_models.checkpoint.match import Match, Source
from unified_models.checkpoint.shards import Shards
from unified_models.formats import find

USUAL, FOUR_OVER_SIX = "nvfp4", "nvfp4_four_over_six"
SMALLEST, LARGEST = 256.0, 384.0
"""The largest block scale of a matrix lies between these under four-over-six; under the usual rule it is 448."""
ENOUGH = 32


def settle_divisor(found: Match, shards: Shards) -> None:
    """Give the NVFP4 sources of a match the rule that packed them, where the config names none.

    One recipe makes a whole checkpoint, so one answer is for all: four-over-six if no block scale of the first
    matrices is above 384. One that is ends the search; otherwise the scales of ENOUGH matrices are read, since a
    matrix that shares its global scale with others may be one of the smaller. Those below 256 everywhere (all zeros,
    or much smaller than what they share with) say nothing. Nothing but block scales is read.
    """
    undecided = [s for s in found.sources if _undecided(s)]
    rule = _rule(shards, undecided)
    if rule == USUAL:
        return
    settled = {id(source) for source in undecided}
    found.sources = [
        replace(source, format=find(rule)) if id(source) in settled else source
        for source in found.sources
    ]
    for source in undecided:
        found.formats[source.part.path] = find(rule)


def _undecided(source: Source) -> bool:
    return source.format is find(USUAL) and not source.master


def _rule(shards: Shards, sources: Iterable[Source]) -> str:
    """The rule of the first sources that tell; the usual one where none does."""
    seen = 0
    for source in sources:
        raw = shards.read(source.scales["scales"].name)
        largest = raw.view(torch.float8_e4m3fn).float().amax().item()
        if largest > LARGEST:
            return USUAL
        seen += largest >= SMALLEST
        if seen == ENOUGH:
            break
    return FOUR_OVER_SIX if seen else USUAL
