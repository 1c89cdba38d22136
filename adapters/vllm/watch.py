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
    """Of each call that was looked at and not judged yet: the greatest logit of each row, and when it is known."""

    waiting: list[tuple[Tensor, torch.cuda.Event]] = field(default_factory=list)

    def look(self, logits: Tensor) -> None:
        """logits: [rows, vocabulary]. FloatingPointError: a NaN in these or, on a GPU, in those of a call whose result
        has come by now.

        The greatest of a row that has a NaN is NaN, on every device, so they are read once.
        """
        if not logits.is_cuda:
            return judge(logits.amax(-1))
        if torch.cuda.is_current_stream_capturing():
            return None
        most_T = logits.amax(-1).to("cpu", non_blocking=True)
        known = torch.cuda.Event()
        known.record()
        self.waiting.append((most_T, known))
        while self.waiting and self.waiting[0][1].query():
            judge(self.waiting.pop(0)[0])
        return None


def judge(most_T: Tensor) -> None:
    """FloatingPointError: one of them, on the host, is NaN; it names the first."""
    bad_T = most_T.isnan()
    if bad_T.any():
        raise FloatingPointError(f"logits of row {int(bad_T.int().argmax())} are NaN; {WHY}")
