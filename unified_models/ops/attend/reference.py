"""One token's grouped-query attention as a plain softmax, in the precision of its input (Ainslie et al. 2023)."""

import torch
from torch import Tensor


def attend(q_HD: Tensor, k_NGD: Tensor, v_NGD: Tensor, *, scale: float) -> Tensor:
    each = q_HD.shape[0] // k_NGD.shape[1]
    k_NHD, v_NHD = (x.repeat_interleave(each, 1) for x in (k_NGD, v_NGD))
    p_HN = torch.softmax(torch.einsum("hd,nhd->hn", q_HD, k_NHD) * scale, -1)
    return torch.einsum("hn,nhd->hd", p_HN, v_NHD)
