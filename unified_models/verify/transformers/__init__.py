"""Against transformers' own class, in float32: logits and every parameter's gradient, within stated bounds.

transformers promises no bits, so this is the one comparison by tolerance: it shows that the two sides are the same
model. Where the model chooses (experts, entries), a choice within rounding of the cut would send the two elsewhere;
such tokens are drawn again. What an architecture needs before transformers computes the same is in a file of its own.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from torch import Tensor

from unified_models.checkpoint import load
from unified_models.checkpoint.names import Names
from unified_models.context.local import LocalContext
from unified_models.context.slots import State
from unified_models.context.step import Step
from unified_models.model import LanguageModel
from unified_models.verify.transformers.choices import draw
from unified_models.verify.transformers.parity import Gradient, Logits, Parity, compare_gradients
from unified_models.verify.transformers.theirs import gradients, installed, quiet, theirs_of
from unified_models.weight import Weight

__all__ = ["LENGTHS", "Gradient", "Logits", "Parity", "against_transformers", "default_lengths"]

LENGTHS = (1, 5, 80, 300)


def default_lengths(model: LanguageModel) -> list[int]:
    """`LENGTHS`, and those around the chunks of a scan. Ascending."""
    chunks = {slot.chunk for slot in model.slots().values() if isinstance(slot, State)}
    edges = {Q + offset for Q in chunks for offset in (-1, 0, 1, Q + 1)}
    return sorted({*LENGTHS, *edges})


def against_transformers(
    folder: str | Path, *, lengths: Sequence[int] | None = None, seed: int = 0
) -> Parity:
    """Compare a checkpoint, both sides in float32 from the same values, with the class that transformers has for it.

    Logits: random sequences of `lengths` (None: `default_lengths`). Gradients: of one random linear functional of the
    log-probabilities of the longest sequence, for every parameter that has one here.

    Raises ValueError where transformers is not installed.
    """
    library = installed()
    model = load(folder, numerics="float32", progress=False)
    generator = torch.Generator().manual_seed(seed)
    parity = Parity(str(folder), seed)
    with tempfile.TemporaryDirectory() as temporary, quiet(library):
        theirs = theirs_of(library, model, Path(temporary) / "float32")
        for length in sorted(default_lengths(model) if lengths is None else lengths):
            ids = draw(model, length, Random(f"{seed} {length}"), parity)
            mine = our_logits(model, ids)
            other = theirs(ids[None], use_cache=False).logits[0]
            difference = (mine - other).abs().max() / other.std()
            parity.logits.append(Logits(length, float(difference.detach())))
        weights = torch.randn(mine.shape, generator=generator)
        for logits in (mine, other):
            (torch.log_softmax(logits, -1) * weights).sum().backward()
        wanted = gradients(theirs, Names.of(model), Path(temporary) / "gradients")
        parity.gradients = compare_gradients(our_gradients(model), wanted)
    return parity


def our_logits(model: LanguageModel, ids: Tensor) -> Tensor:
    """[T, V], with their graph."""
    ctx = LocalContext(Step.of([len(ids)]))
    return model.logits(model(ids, ctx), ctx)


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
