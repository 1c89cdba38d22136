"""The two products of a linear's backward, for a weight in any format: dX = dY w and dW = dY^T x.

On CPU, and of two float32 operands on a GPU, they are torch's in float32. Else a GPU multiplies on tensor cores with
float32 sums, and reads each operand without loss: see `Factor` and `rows_read`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from unified_models.formats.activations import GROUP
from unified_models.formats.fp4 import NVFP4
from unified_models.formats.weights import BlockFP8, TensorFP8
from unified_models.ops.linear import arithmetic, narrow
from unified_models.weight import Reading

HEAD = 1 << 27
"""Values of a matrix that only a vocabulary makes so large."""


@dataclass(frozen=True)
class Factor:
    """What dY multiplies on a GPU, for a weight of [N, K], [groups * N, K] or [E, N, K].

    w: [G, N, K'] bfloat16, e4m3 codes, or float32 values of what has neither; scales: of 128 x 128 blocks of codes,
    float32 [G, N/128, K'/128], N rounded up, or None; outer: float32 [G], multiplies a matrix's sums, or None.
    """

    w: Tensor
    scales: Tensor | None = None
    outer: Tensor | None = None

    def matrix(self, g: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
        return (
            self.w[g],
            None if self.scales is None else self.scales[g],
            None if self.outer is None else self.outer[g],
        )


def factor(reading: Reading) -> Factor:
    """A weight's own bytes with their scales left out where a kernel multiplies by them: nothing is rounded."""
    fmt, (stack, N) = reading.format, arithmetic.stacked(reading)
    if isinstance(fmt, BlockFP8):
        if stack > 1 and len(reading.shape) == 2 and N % fmt.block:
            return Factor(reading.dequantized().view(stack, N, -1))  # a block lies in two groups
        held = reading.operand(arithmetic.block_bytes)
        return Factor(held.w, held.scales)
    w = reading.operand(arithmetic.operand).w
    outer = None
    if isinstance(fmt, TensorFP8):
        outer = reading.packed["scale"]
    elif isinstance(fmt, NVFP4):
        outer = reading.packed["global"]
    return Factor(w, None, None if outer is None else outer.float().expand(stack))


def rows_read(
    x: Tensor, reading: Reading, counts_E: Sequence[int] | Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """`reading.seen(x)` on a GPU, [..., K]: bfloat16, or x's float32 values; and what multiplies sums of them, float32
    [] or [E], or None. Block FP8's codes times their scales, powers of two, are exact in bfloat16.
    """
    if reading.format.input == "plain":
        return x if x.dtype in (torch.bfloat16, torch.float32) else x.float(), None
    rows = arithmetic.prepare(x, reading, counts_E)
    codes = rows.x.bfloat16()
    if rows.scales is None:
        return codes, reading.input_scale
    blocks = codes.unflatten(-1, (-1, GROUP)) * rows.scales.bfloat16()[..., None]
    return blocks.flatten(-2)[..., : x.shape[-1]], None


def taken(dy: Tensor, reading: Reading | None = None) -> Tensor:
    """A gradient as kernels read it: its last dimension contiguous, bfloat16 or float32. That of a head's logits is
    rounded to bfloat16, as every trainer has it: its three pieces would take as long as all else."""
    if reading is not None and reading.shape.numel() >= HEAD:
        return dy.to(torch.bfloat16).contiguous()
    dy = dy if dy.dtype in (torch.bfloat16, torch.float32) else dy.float()
    return dy.contiguous()


def by_deep_gemm(a: Tensor, b: Tensor, shape_NK: Tensor, dtype: torch.dtype) -> bool:
    """Whether DeepGEMM multiplies: of bfloat16 operands, for a matrix for which it does in the forward (`large`)."""
    narrow_ = a.dtype == b.dtype == torch.bfloat16 and dtype in (torch.float32, torch.bfloat16)
    return narrow_ and narrow.large(shape_NK) and narrow.deep_gemm_release() is not None


def deep_gemm() -> Any:
    """The library. It asks the driver for this thread's context, and a thread of autograd's has none before its first
    call to the runtime."""
    torch.cuda.current_stream().query()
    return import_module("deep_gemm")


def dgrad(dy: Tensor, reading: Reading, dtype: torch.dtype) -> Tensor:
    """dY @ w, rounded once to `dtype`. dy: [T, N], or [T, groups, N]; returns [T, K], or [T, groups, K]."""
    groups, K = reading.weight.groups, reading.shape[-1]
    if dy.is_cuda:
        dy, read = taken(dy, reading), factor(reading)
        if not dy.dtype == read.w.dtype == torch.float32:
            out = torch.empty(*dy.shape[:-1], K, dtype=dtype, device=dy.device)
            rows, outs = (dy, out) if groups > 1 else (dy[:, None], out[:, None])
            for g in range(groups):
                _dgrad(rows[:, g], *read.matrix(g), outs[:, g])
            return out
    w = reading.dequantized()
    if groups == 1:
        return (dy.float() @ w).to(dtype)
    return torch.einsum("tgn,gnk->tgk", dy.float(), w.unflatten(0, (groups, -1))).to(dtype)


def _dgrad(
    dy_TN: Tensor, w_NK: Tensor, scales: Tensor | None, outer: Tensor | None, out_TK: Tensor
) -> None:
    from unified_models.ops.linear import backward_triton as kernels

    whole = scales is None and outer is None and out_TK.is_contiguous() and dy_TN.is_contiguous()
    if whole and len(dy_TN) and by_deep_gemm(dy_TN, w_NK, w_NK, out_TK.dtype):
        deep_gemm().bf16_gemm_nn(dy_TN, w_NK, out_TK)
    else:
        kernels.dgrad(dy_TN, w_NK, out_TK, scales, outer)


def wgrad(dy: Tensor, x: Tensor, reading: Reading) -> Tensor:
    """dY^T @ x as the product saw it, in the master gradient's dtype: [N, K], or [groups * N, K]."""
    groups, dtype = reading.weight.groups, reading.grad_dtype
    if dy.is_cuda:
        dy = taken(dy, reading)
        rows, outer = rows_read(x, reading)
        if not dy.dtype == rows.dtype == torch.float32:
            if groups == 1:
                return _wgrad(dy, rows, outer, dtype)
            parts = (_wgrad(dy[:, g], rows[:, g], outer, dtype) for g in range(groups))
            return torch.cat(tuple(parts))
    seen, wide = reading.seen(x), dy.float()
    if groups == 1:
        return (wide.T @ seen).to(dtype)
    return torch.einsum("tgn,tgk->gnk", wide, seen).flatten(0, 1).to(dtype)


def _wgrad(dy_TN: Tensor, x_TK: Tensor, outer: Tensor | None, dtype: torch.dtype) -> Tensor:
    from unified_models.ops.linear import backward_triton as kernels

    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    out = torch.empty(dy_TN.shape[1], x_TK.shape[1], dtype=dtype, device=x_TK.device)
    whole = outer is None and dy_TN.is_contiguous() and x_TK.is_contiguous()
    if whole and len(dy_TN) and by_deep_gemm(dy_TN, x_TK, out, dtype):
        deep_gemm().bf16_gemm_tn(dy_TN, x_TK, out)
        return out
    product: Tensor = kernels.wgrad(dy_TN, x_TK, dtype, outer)
    return product
