"""The router's choice, by one written rule."""

import torch
from torch import Tensor

from unified_models.ops.operator import operator

NEVER = torch.iinfo(torch.int64).min


def ordered_bits(x: Tensor) -> Tensor:
    """int64 numbers in the order of float32 x, -0 folded into +0; the order of NaN is not meant."""
    bits = (x + 0.0).contiguous().view(torch.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()


@operator
def choose(scores_TE: Tensor, k: int) -> Tensor:
    """ids_TK of the k highest scores: higher score first, ties to the lower expert, NaN never. int64.

    A token with fewer than k scores that are numbers: ValueError on CPU. On CUDA, where asking would wait for the GPU,
    NaN comes after all numbers, lower expert first, so that its gate is NaN, and with it the token's logits.
    """
    E = scores_TE.shape[-1]
    if not 1 <= k <= E:
        raise ValueError(f"choose {k} of {E} experts")
    scores_TE = scores_TE.detach()
    if scores_TE.is_cuda:
        from unified_models.ops.choose import triton as kernels

        return kernels.choose(scores_TE, k)
    ids_E = torch.arange(E, device=scores_TE.device)
    keys = (ordered_bits(scores_TE.float()) << 32) | (E - 1 - ids_E)
    keys = keys.masked_fill(scores_TE.isnan(), NEVER)
    best = keys.topk(k, -1).values  # all keys differ, so no tie is left to topk
    if bool((best == NEVER).any()):
        bad = int((best == NEVER).any(-1).nonzero()[0])
        have = int((~scores_TE[bad].isnan()).sum())  # a count
        raise ValueError(f"router scores of row {bad}: {have} of {E} are numbers, {k} are needed")
    return E - 1 - (best & 0xFFFFFFFF)
