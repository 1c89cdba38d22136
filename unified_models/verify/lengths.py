"""Lengths at which a model has something to get wrong, read off what it declares."""

import torch
from torch import nn

from unified_models.context.local import LocalContext
from unified_models.context.slots import Entries, Rows, State
from unified_models.model import LanguageModel
from unified_models.ops.blocks import BLOCK
from unified_models.training import logprobs
from unified_models.verify.schedule import SAMPLED

ALWAYS = (*range(6), 7, 8, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300)


def default_lengths(model: LanguageModel) -> list[int]:
    """`ALWAYS`, and one below, at and one above each window, stride, block of keys, one and two chunks of a scan, and
    the number of tokens whose entries just fill what a query picks. Ascending, within max_position_embeddings."""
    edges = {BLOCK}
    for slot in model.slots().values():
        if isinstance(slot, Rows) and slot.keep is not None:
            edges.add(slot.keep)
        elif isinstance(slot, Entries):
            edges |= {slot.stride, slot.span}
        elif isinstance(slot, State):
            edges |= {slot.chunk, 2 * slot.chunk}
    edges |= picked_tokens(model)
    lengths = {*ALWAYS, *(edge + offset for edge in edges for offset in (-1, 0, 1))}
    most = getattr(model.config, "max_position_embeddings", max(lengths) + SAMPLED)
    return sorted(length for length in lengths if length + SAMPLED <= most)


@torch.no_grad()
def picked_tokens(model: LanguageModel) -> set[int]:
    """Entries that a query picks, times the tokens of an entry, for each place where the model picks."""
    found: set[int] = set()

    def look(site: nn.Module, name: str, value: tuple[torch.Tensor, ...]) -> None:
        if name == "select":
            slots = [slot for module in site.modules() for slot in vars(module).values()]
            found.update(s.stride * value[-1].shape[-1] for s in slots if isinstance(s, Entries))

    logprobs(model, [[0, 0]], context=lambda step: LocalContext(step, onlooker=look))
    return found
