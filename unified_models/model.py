"""What every architecture's `Model` is: a module over Weights, Tables and slots that a context runs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from unified_models.context.slots import Slot, slots
from unified_models.weight import Table, Weight


class LanguageModel(nn.Module):
    """Base of the `Model` class of each model file.

    A model file's Model defines `start(ids_T, ctx) -> x`, what the first of its `blocks` reads, [T, *row];
    `finish(x, ctx) -> hidden_TM`, what follows the last, up to the final norm; and `logits(hidden_TM, ctx) -> float32
    logits_TV`, so that a sampler or a chunked log-softmax can ask for the logits of the rows it wants. Between them a
    model may be cut over processes.
    """

    config: Any
    blocks: nn.ModuleList
    numerics: str = "deployed"
    weights_from: str = "master"
    """ "master": every packed byte is pack(bf16(master)). "file": the checkpoint's own bytes, for serving only."""
    load_report: Any = None
    """What `checkpoint.load` did (a `LoadReport`); None for a model that was not loaded."""

    @classmethod
    def file(cls) -> str:
        """The module of the model file, also of a class that a trainer derived from its Model."""
        return next(c.__module__ for c in cls.__mro__ if LanguageModel in c.__bases__)

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """(module path, Weight) in module order."""
        return ((path, m) for path, m in self.named_modules() if isinstance(m, Weight))

    def tables(self) -> Iterator[tuple[str, Table]]:
        """(module path, Table) in module order."""
        return ((path, m) for path, m in self.named_modules() if isinstance(m, Table))

    def slots(self) -> dict[str, Slot]:
        """What the model keeps for each sequence, by module path."""
        return slots(self)

    def name_parts(self) -> None:
        """Tell each Weight, Table and slot its module path, for errors and memories."""
        for path, weight in self.weights():
            weight.label = path
        for path, table in self.tables():
            table.label = path
        self.slots()

    def commit(self) -> None:
        """Derive the packed bytes of every weight whose master changed since its last commit, in place."""
        for _, weight in self.weights():
            if weight.master is not None and weight.committed != weight.version:
                weight.commit()

    def commit_after(self, optimizer: torch.optim.Optimizer) -> None:
        """Commit after each of the optimizer's steps.

        ValueError: it holds the whole copy of a master that is cut over processes, which lives for one forward.
        """
        held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        for path, weight in self.weights():
            if weight.master in held and weight.master is not weight.owned:
                raise ValueError(
                    f"{path}: the optimizer holds the copy that was made whole for a forward, not the master; "
                    "make the optimizer before the first forward"
                )
        optimizer.register_step_post_hook(lambda *_: self.commit())

    @property
    def row(self) -> tuple[int, ...]:
        """Shape of what one token is between blocks; (M,)."""
        return (self.config.hidden_size,)

    def forward(self, ids_T: Tensor, ctx: Any) -> Tensor:
        """hidden_TM of token ids, int64: from embedding to final norm."""
        x = self.start(ids_T, ctx)
        for block in self.blocks:
            x = self.through(block, x, ids_T, ctx)
        return self.finish(x, ctx)

    def start(self, ids_T: Tensor, ctx: Any) -> Tensor:
        """What the first block reads; each model file says how."""
        raise AssertionError(f"{type(self).__name__} defines no start")

    def through(self, block: nn.Module, x: Tensor, ids_T: Tensor, ctx: Any) -> Tensor:
        """What a block makes of x, of the tokens ids_T."""
        return block(x, ctx)  # type: ignore[no-any-return]

    def finish(self, x: Tensor, ctx: Any) -> Tensor:
        """hidden_TM of what the last block made; each model file says how."""
        raise AssertionError(f"{type(self).__name__} defines no finish")

    def logits(self, hidden_TM: Tensor, ctx: Any) -> Tensor:
        """float32 logits of the given rows; each model file says how."""
        raise AssertionError(f"{type(self).__name__} defines no logits")


def bind_numerics(model: LanguageModel, numerics: str) -> None:
    """deployed: formats as the checkpoint and the architecture have them. float32: no quantisation anywhere; the
    same operator calls, other formats bound to weights and slots."""
    if numerics not in ("deployed", "float32"):
        raise ValueError(f"numerics must be 'deployed' or 'float32', got {numerics!r}")
    model.numerics = numerics
    if numerics == "float32":
        for _, weight in model.weights():
            weight.bind("float32")
        for slot in model.slots().values():
            slot.plain()
    for slot in model.slots().values():
        slot.check()
