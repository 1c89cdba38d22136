"""A causal depthwise convolution over a sequence's last few rows."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator


@operator
def conv(rows_RC: Tensor, index_TK: Tensor, taps_CK: Tensor, bias_C: Tensor | None) -> Tensor:
    """bias + sum_k taps[:, k] * rows[index[:, k]], float32 [T, C]: the bias, then written adds, oldest tap first.

    index_TK: the row that each tap reads, oldest first; -1 before the sequence's start, which counts as zeros whatever
    the memory holds.
    """
    rows = torch.cat((rows_RC.float(), rows_RC.new_zeros(1, rows_RC.shape[1]).float()))
    total = torch.zeros_like(taps_CK[:, 0]) if bias_C is None else bias_C
    out = total.expand(len(index_TK), -1)
    for k in range(taps_CK.shape[1]):
        seen_TC = rows.index_select(0, index_TK[:, k] % len(rows))  # -1: the row of zeros
        out = out + taps_CK[:, k] * seen_TC
    return out
