"""The weights of a token's experts: one program a token."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _route_weights(
    scores_ptr, ids_ptr, out_ptr, E, scaling, tiny, K: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """out[t, k] = scores[t, ids[t, k]] / (their sum + tiny) * scaling; the tree of tl.sum over WIDTH places."""
    t, k = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    e = tl.load(ids_ptr + t * K + k, mask=k < K, other=0)
    chosen = tl.load(scores_ptr + t * E + e, mask=k < K, other=0.0)
    total = tl.sum(chosen, axis=0) + tiny  # one tree, whatever the number of tokens
    out = tl.div_rn(chosen, tl.zeros((WIDTH,), dtype=tl.float32) + total) * scaling
    tl.store(out_ptr + t * K + k, out, mask=k < K)


def route_weights(scores_TE: Tensor, ids_TK: Tensor, scaling: float) -> Tensor:
    """float32 [T, K] of float32 scores and int64 ids."""
    from unified_models.ops.router_scores import TINY

    (T, E), K = scores_TE.shape, ids_TK.shape[1]
    out = torch.empty(T, K, dtype=torch.float32, device=scores_TE.device)
    if T:
        width = max(triton.next_power_of_2(K), 16)
        _route_weights[(T,)](
            scores_TE.contiguous(),
            ids_TK.contiguous(),
            out,
            E,
            scaling,
            TINY,
            K,
            width,
            num_warps=1,
        )
    return out
