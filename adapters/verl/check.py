"""The rollout's logprobs against ours, bit for bit, before every update."""

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from unified_models.verify.compare import Comparison, UnequalError, bits

MODES = ("stop", "report", "off")
log = logging.getLogger(__name__)


class BitCheck:
    """Compares `rollout_log_probs` with the training forward's logprobs over the response mask.

    mode: of MODES. Until the first update after the weights were sent, our forward is of the rollout's weights and is
    compared itself, whether it infers or trains. After it, the weights have moved on: then `old_log_probs` of the batch
    are compared, if this engine has computed logprobs under the rollout's weights.
    """

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.sent()

    def sent(self) -> None:
        """The rollout has these weights from now on."""
        self.updates, self.recomputed = 0, False

    def stepped(self) -> None:
        """The optimizer changed the weights."""
        self.updates += 1

    def compare(
        self, data: Any, log_probs: Tensor, *, trains: bool, group: Any = None
    ) -> Comparison | None:
        """Compare a batch; None where there is nothing to say about it: off, or logprobs that only infer and have no
        rollout beside them.

        Args:
            data: TensorDict with prompts, responses, response_mask, and rollout_log_probs [S, longest response] or
                jagged.
            log_probs: jagged [S, length], as the engine computed them for `data`.
            trains: an update follows.
            group: the processes that train together: they count together, and all of them stop.

        Returns the counts of all processes, and the first unequal token of this one.

        Raises:
            UnequalError: mode "stop", and a token has other bits: the first is named with both patterns; or nothing was
                compared, whatever the mode.
            ValueError: an update follows, and its batch cannot be compared: the reason, and what to set.
        """
        if self.mode == "off":
            return None
        if not trains and self.updates:
            return None
        self.recomputed |= not trains
        if "rollout_log_probs" not in data:
            if trains:
                raise ValueError(
                    "rollout_log_probs is not in the batch of an update, so its bits cannot be compared: set "
                    "rollout.calculate_log_probs=True, or check: off in the engine's settings"
                )
            return None
        return self._require(data, self._bits(data, log_probs), group)

    def _bits(self, data: Any, log_probs: Tensor) -> Comparison:
        ours = no_padding_2_padding(log_probs.detach(), data)
        if self.updates:
            if not self.recomputed:
                raise ValueError(
                    f"{self.updates} updates since the weights were sent, and this engine has computed no logprobs "
                    "under them: old_log_probs are the rollout's own (bypass_mode), so nothing can be compared. Let "
                    "them be recomputed, make one update for each rollout, or set check: off"
                )
            ours = padded(data["old_log_probs"], ours.shape[1])
        rollout = padded(data["rollout_log_probs"], ours.shape[1])
        mask = padded(data["response_mask"], ours.shape[1]).bool()
        return bits(rollout, ours.to(rollout.device), mask.to(rollout.device))

    def _require(self, data: Any, own: Comparison, group: Any) -> Comparison:
        compared, unequal = together(own, group)
        result = Comparison(compared, unequal, own.first)
        if compared == 0:
            raise UnequalError("nothing was compared (0 response tokens have a rollout logprob)")
        if unequal == 0:
            return result
        text = f"{unequal} of {compared} response tokens have other bits in the training forward"
        if result.first is None:
            text += "; the first is another process's"
        else:
            (i, j), rollout, ours = result.first
            text += (
                f"; the first is sequence {i}, response token {j} (id {int(data['responses'][i][j])}): "
                f"rollout {rollout:#010x}, training {ours:#010x}"
            )
        if self.mode == "stop":
            raise UnequalError(text)
        log.warning(text)
        return result


def together(result: Comparison, group: Any) -> tuple[int, int]:
    """(compared, unequal) of all processes of the group; None: of this one."""
    if group is None:
        return result.compared, result.unequal
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    counts = torch.tensor([result.compared, result.unequal], device=device)
    dist.all_reduce(counts, group=group)
    return int(counts[0]), int(counts[1])


def padded(values: Tensor, width: int) -> Tensor:
    """[S, width] of a tensor of that shape, or of a jagged one; 0 beyond a row's end."""
    if not values.is_nested:
        return values
    rows = [torch.nn.functional.pad(row, (0, width - len(row))) for row in values.unbind()]
    return torch.stack(rows)
