"""Manifold-constrained hyper-connections (DeepSeek-V4, 2.2): X residual streams, mixed doubly stochastically."""

import torch
from torch import Tensor

from unified_models.ops.activation import sigmoid
from unified_models.ops.hyper_connect.sinkhorn import sinkhorn
from unified_models.ops.operator import operator
from unified_models.ops.rerun import rerun
from unified_models.ops.sums import ordered_sum, row_mean


@operator
def hyper_normalize(projected_TC: Tensor, streams_TXM: Tensor, eps: float) -> Tensor:
    """The projection of the flattened streams, divided by their root mean square; float32."""
    if streams_TXM.is_cuda:
        from unified_models.ops.hyper_connect import triton as kernels

        out: Tensor = rerun(
            kernels.hyper_normalize, _hyper_normalize, projected_TC, streams_TXM, eps
        )
        return out
    return _hyper_normalize(projected_TC, streams_TXM, eps)


def _hyper_normalize(projected_TC: Tensor, streams_TXM: Tensor, eps: float) -> Tensor:
    flat = streams_TXM.flatten(1).float().contiguous()
    return projected_TC * torch.rsqrt(row_mean(flat.square()) + eps)


@operator
def hyper_maps(
    mixes_TC: Tensor, scale_3: Tensor, base_C: Tensor, *, streams: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre_TX, post_TX, comb_TXX, float32, from the normalised projection: C = X * (2 + X) rows pre, post, comb.

    comb (row-major): softmax of each row, then `iterations` Sinkhorn normalisations, columns last.
    """
    args = (mixes_TC, scale_3, base_C, streams, iterations, eps)
    if mixes_TC.is_cuda:
        from unified_models.ops.hyper_connect import triton as kernels

        maps: tuple[Tensor, Tensor, Tensor] = rerun(kernels.hyper_maps, _hyper_maps, *args)
        return maps
    return _hyper_maps(*args)


def _hyper_maps(
    mixes_TC: Tensor, scale_3: Tensor, base_C: Tensor, X: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    pre, post, comb = mixes_TC.split((X, X, X * X), -1)
    base_pre, base_post, base_comb = base_C.split((X, X, X * X))
    pre_TX = sigmoid(pre * scale_3[0] + base_pre) + eps
    post_TX = 2 * sigmoid(post * scale_3[1] + base_post)
    comb_TXX = sinkhorn((comb * scale_3[2] + base_comb).unflatten(-1, (X, X)), iterations, eps)
    return pre_TX, post_TX, comb_TXX


@operator
def hyper_collapse(streams_TXM: Tensor, pre_TX: Tensor) -> Tensor:
    """sum_i pre_i X_i over the streams, first to last, float32; rounded once to the streams' dtype."""
    if streams_TXM.is_cuda:
        from unified_models.ops.hyper_connect import triton as kernels

        out: Tensor = rerun(kernels.hyper_collapse, _hyper_collapse, streams_TXM, pre_TX)
        return out
    return _hyper_collapse(streams_TXM, pre_TX)


def _hyper_collapse(streams_TXM: Tensor, pre_TX: Tensor) -> Tensor:
    return ordered_sum(streams_TXM.float() * pre_TX[..., None], 1).to(streams_TXM.dtype)


@operator
def hyper_expand(out_TM: Tensor, streams_TXM: Tensor, post_TX: Tensor, comb_TXX: Tensor) -> Tensor:
    """X'_j = post_j out + sum_i comb[i, j] X_i: row i is the source, column j the target. Sources are added first to
    last, float32; rounded once to the streams' dtype."""
    args = (out_TM, streams_TXM, post_TX, comb_TXX)
    if streams_TXM.is_cuda:
        from unified_models.ops.hyper_connect import triton as kernels

        mixed: Tensor = rerun(kernels.hyper_expand, _hyper_expand, *args)
        return mixed
    return _hyper_expand(*args)


def _hyper_expand(out_TM: Tensor, streams_TXM: Tensor, post_TX: Tensor, comb_TXX: Tensor) -> Tensor:
    mixed = out_TM.float()[:, None] * post_TX[..., None]
    for i, stream_TM in enumerate(streams_TXM.float().unbind(1)):
        mixed = mixed + stream_TM[:, None] * comb_TXX[:, i, :, None]
    return mixed.to(streams_TXM.dtype)


__all__ = ["hyper_collapse", "hyper_expand", "hyper_maps", "hyper_normalize", "sinkhorn"]
