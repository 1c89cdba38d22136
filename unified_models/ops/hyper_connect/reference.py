"""Hyper-connection maps and mixes as matrix algebra, in the precision of the input."""

import torch
from torch import Tensor


def maps(
    streams_TXM: Tensor,
    fn_CK: Tensor,
    scale_3: Tensor,
    base_C: Tensor,
    *,
    iterations: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    X = streams_TXM.shape[1]
    x = streams_TXM.flatten(1)
    x = x / torch.sqrt((x * x).mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = (x @ fn_CK.T).split((X, X, X * X), -1)
    b_pre, b_post, b_comb = base_C.split((X, X, X * X))
    comb = torch.softmax((comb * scale_3[2] + b_comb).unflatten(-1, (X, X)), -1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return (
        torch.sigmoid(pre * scale_3[0] + b_pre) + eps,
        2 * torch.sigmoid(post * scale_3[1] + b_post),
        comb,
    )


def collapse(streams_TXM: Tensor, pre_TX: Tensor) -> Tensor:
    return torch.einsum("tx,txm->tm", pre_TX, streams_TXM)


def expand(out_TM: Tensor, streams_TXM: Tensor, post_TX: Tensor, comb_TXX: Tensor) -> Tensor:
    return post_TX[..., None] * out_TM[:, None] + torch.einsum(
        "tij,tim->tjm", comb_TXX, streams_TXM
    )
