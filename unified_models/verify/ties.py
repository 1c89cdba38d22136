"""Ties on purpose: scores on a coarse grid, so that every choice meets equal ones."""

import torch
from torch import Tensor, nn

from unified_models.context.interface import Pool
from unified_models.context.local import LocalContext


class TiesContext(LocalContext):
    """LocalContext where random weights meet ties, too. What it changes is a function of a token's own row, so the
    contract holds as before."""

    def choose(self, scores_TE: Tensor, k: int, site: nn.Module) -> Tensor:
        """Router scores in steps of 1/4: many experts score alike."""
        return super().choose((scores_TE * 4).round() / 4, k, site)

    def select(
        self, q_TJI: Tensor, weights_TJ: Tensor, pool: Pool, k: int, site: nn.Module
    ) -> Tensor:
        """One head, with a negative weight: about half of the entries score exactly 0, and none higher."""
        one = torch.zeros_like(weights_TJ)
        one[:, 0] = -weights_TJ[:, 0].abs()
        return super().select(q_TJI, one, pool, k, site)
