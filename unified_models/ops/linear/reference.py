"""A linear as the straight-through reference: every quantiser is q(x) = x + (q(x) - x).detach()."""

from torch import Tensor


def straight_through(x: Tensor, quantized: Tensor) -> Tensor:
    return x + (quantized.to(x.dtype) - x).detach()


def linear(
    x_TK: Tensor, w_NK: Tensor, x_quantized: Tensor | None = None, w_quantized: Tensor | None = None
) -> Tensor:
    """x: [T, K], w: [N, K], in any precision; the quantised values, if any, in x's and w's shape."""
    x = x_TK if x_quantized is None else straight_through(x_TK, x_quantized)
    w = w_NK if w_quantized is None else straight_through(w_NK, w_quantized)
    return x @ w.T
