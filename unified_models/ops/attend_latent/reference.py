"""One token's attention as a plain softmax with the sink as one more column, in the precision of its input."""

import torch
from torch import Tensor


def attend_latent(
    q_HD: Tensor, rows_ND: Tensor, *, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    s_HN = q_HD @ rows_ND.T * scale
    if sinks_H is None:
        return torch.softmax(s_HN, -1) @ rows_ND
    return torch.softmax(torch.cat((s_HN, sinks_H[:, None]), -1), -1)[:, :-1] @ rows_ND
