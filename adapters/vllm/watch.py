"""Whether logits were numbers, without waiting for a GPU."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

WHY = (
    "after weights were replaced, vLLM's prefix cache must be dropped: "
    "llm.reset_prefix_cache(reset_running_requests=True)"
)


@dataclass
class Watch:
    """Of each call that was looked at and not judged yet: the row of its first NaN, -1 for none, and when it is
    known."""

    waiting: list[tuple[Tensor, torch.cuda.Event]] = field(default_factory=list)

    def look(self, logits: Tensor) -> None:
        """FloatingPointError: a NaN in these logits or, on a GPU, in those of a call whose result has come by now."""
        bad_T = logits.isnan().any(-1)
        if not logits.is_cuda:
            return judge(first(bad_T))
        if torch.cuda.is_current_stream_capturing():
            return None
        row = first(bad_T).to("cpu", non_blocking=True)
        known = torch.cuda.Event()
        known.record()
        self.waiting.append((row, known))
        while self.waiting and self.waiting[0][1].query():
            judge(self.waiting.pop(0)[0])
        return None


def first(bad_T: Tensor) -> Tensor:
    """The first row that is True; -1: none."""
    return torch.where(bad_T.any(), bad_T.int().argmax(), -1)


def judge(row: Tensor) -> None:
    """FloatingPointError: there is such a row."""
    if row >= 0:
        raise FloatingPointError(f"logits of row {int(row)} are NaN; {WHY}")
