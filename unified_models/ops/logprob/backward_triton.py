"""The gradient of a token's logprob in one pass over the logits."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rows import rows_of

BLOCK = 4096
"""Logits of a program."""
FAR = -32.0
"""A logprob below this one has lost digits that others need: its row is looked through for its largest logit."""


@triton.jit
def _logprobs_backward(
    dlp_ptr, logits_ptr, temperature_ptr, ids_ptr, lps_ptr, out_ptr, V, stride,
    SCALED: tl.constexpr, FAR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dx[v] = (1[v = id] - p[v]) dlp / T, p[v] = exp((x[v] - x[a]) / T + log p[a]), where a is the id, or the largest
    of a row in which the id's logprob is FAR below 0."""
    blocks = tl.cdiv(V, BLOCK)
    row, first = tl.program_id(0) // blocks, tl.program_id(0) % blocks * BLOCK
    x_ptr = logits_ptr + row.to(tl.int64) * stride
    lane = tl.arange(0, BLOCK)
    n = first + lane
    x = tl.load(x_ptr + n, mask=n < V, other=0.0)
    id = tl.load(ids_ptr + row)
    near, lp, slope = tl.load(x_ptr + id), tl.load(lps_ptr + row), tl.load(dlp_ptr + row)
    inverse = 1.0
    if SCALED:
        inverse = 1.0 / tl.load(temperature_ptr + row)
    if lp < FAR:
        most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            inside = start + lane < V
            most = tl.maximum(most, tl.load(x_ptr + start + lane, mask=inside, other=float("-inf")))
        near = tl.max(most, axis=0)
        total = tl.zeros((BLOCK,), dtype=tl.float32)
        for start in range(0, V, BLOCK):
            inside = start + lane < V
            other = tl.load(x_ptr + start + lane, mask=inside, other=float("-inf"))
            total += tl.exp((other - near) * inverse)
        lp = -tl.log(tl.sum(total, axis=0))
    p = tl.exp((x - near) * inverse + lp)
    dx = (tl.where(n == id, 1.0, 0.0) - p) * (slope * inverse)
    out = out_ptr + row.to(tl.int64) * V + n
    tl.store(out, dx.to(out_ptr.dtype.element_ty), mask=n < V)


def logprobs_backward(
    dlp_T: Tensor, logits_TV: Tensor, temperature_T: Tensor | None, ids_T: Tensor, lps_T: Tensor
) -> Tensor:
    """The logits' gradient, float32 [T, V], for that of their logprobs `lps_T`, float32 [T].

    logits_TV: float32, rows any stride apart; temperature_T: float32, None: all are 1; ids_T: int64.
    """
    T, V = logits_TV.shape
    dlogits_TV = torch.empty(T, V, dtype=logits_TV.dtype, device=logits_TV.device)
    if dlogits_TV.numel() == 0:
        return dlogits_TV
    rows_TV, scaled = rows_of(logits_TV), temperature_T is not None
    block = min(triton.next_power_of_2(V), BLOCK)
    _logprobs_backward[(T * triton.cdiv(V, block),)](
        dlp_T.contiguous(), rows_TV, lps_T if temperature_T is None else temperature_T.contiguous(),
        ids_T.contiguous(), lps_T.contiguous(), dlogits_TV, V, rows_TV.stride(0),
        scaled, FAR, block, num_warps=4,
    )  # fmt: skip
    return dlogits_TV
