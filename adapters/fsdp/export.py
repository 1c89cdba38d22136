"""A cut model as a checkpoint folder under official names: the first process writes, the others answer."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from unified_models.adapters.fsdp.gathering import all_parts, values
from unified_models.checkpoint.names import Part
from unified_models.checkpoint.saving import save
from unified_models.context.parallel import Parallel
from unified_models.model import LanguageModel

DONE = -1


@torch.no_grad()
def export(
    model: LanguageModel, folder: str | Path, parallel: Parallel | None = None, **options: Any
) -> None:
    """`checkpoint.save` of a model whose masters lie on several processes; options are its own.

    Collective. The first process asks for one tensor at a time, so that none has to hold more; a problem that it
    meets is raised on every process.
    """
    parts = all_parts(model)
    numbers = {id(part): number for number, part in enumerate(parts)}
    groups = parallel or Parallel()

    def ask(part: Part) -> Tensor:
        _tell(numbers[id(part)])
        return values(part, groups)

    problem: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            save(model, folder, parts=parts, values=ask, **options)
        except (OSError, ValueError, RuntimeError) as error:
            problem = [error]
        _tell(DONE)
    else:
        while (number := _told()) != DONE:
            values(parts[number], groups)
    dist.broadcast_object_list(problem, src=0)
    if problem[0] is not None:
        raise problem[0]


def _tell(number: int) -> None:
    dist.broadcast(torch.tensor([number]), src=0)


def _told() -> int:
    number = torch.empty(1, dtype=torch.int64)
    dist.broadcast(number, src=0)
    return int(number)
