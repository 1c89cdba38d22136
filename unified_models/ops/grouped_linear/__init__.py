"""One matrix for each expert, over rows sorted by expert."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.linear import arithmetic, gradients
from unified_models.ops.operator import operator
from unified_models.weight import Reading


def _spans(counts_E: Sequence[int] | Tensor) -> list[tuple[int, slice]]:
    """(expert, its rows) for the experts that have any."""
    spans, start = [], 0
    for e, count in enumerate(counts_E.tolist() if isinstance(counts_E, Tensor) else counts_E):
        if count:
            spans.append((e, slice(start, start + count)))
        start += count
    return spans


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        master: Tensor | None,
        reading: Reading,
        rows: arithmetic.Input,
        counts_E: Sequence[int] | Tensor,
        tiles: Any,
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.reading, ctx.counts, ctx.tiles = reading, counts_E, tiles
        w = reading.operand(arithmetic.operand)
        if tiles is not None:
            return _by_kernel(rows, w, tiles, reading.format.activation)
        y = torch.empty(len(x), w.N, dtype=reading.format.activation, device=x.device)
        for e, span in _spans(counts_E):
            y[span] = arithmetic.product(rows.rows(span), w, e).to(y.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        reading: Reading = ctx.reading
        reading.check()
        (x,), dy = ctx.saved_tensors, grads[0]
        dx = dw = None
        if ctx.tiles is not None:
            if ctx.needs_input_grad[0]:
                dx = _dgrad(dy, reading, ctx.tiles, x.dtype)
            if ctx.needs_input_grad[1]:
                dw = _wgrad(dy, x, reading, ctx.tiles)
            return dx, dw, None, None, None, None
        dy, spans = dy.float(), _spans(ctx.counts)
        if ctx.needs_input_grad[0]:
            w = reading.dequantized()
            dx = torch.empty_like(x)
            for e, span in spans:
                dx[span] = (dy[span] @ w[e]).to(x.dtype)
        if ctx.needs_input_grad[1]:
            dw = torch.zeros(reading.shape, dtype=reading.grad_dtype, device=x.device)
            for e, span in spans:
                dw[e] = dy[span].T @ reading.seen(x[span], e)
        return dx, dw, None, None, None, None


def _by_kernel(
    rows: arithmetic.Input, w: arithmetic.Operand, tiles: Any, dtype: torch.dtype
) -> Tensor:
    from unified_models.ops.grouped_linear import triton as kernels

    out: Tensor = kernels.grouped_product(
        rows.x, w.w, tiles, xs_PB=rows.scales, ws_ECB=w.scales, outer_E=w.outer, dtype=dtype
    )
    return out


def _dgrad(dy: Tensor, reading: Reading, tiles: Any, dtype: torch.dtype) -> Tensor:
    from unified_models.ops.grouped_linear import backward_triton as kernels

    w = gradients.factor(reading)
    out: Tensor = kernels.dgrad(
        gradients.taken(dy), w.w, reading.shape[-1], tiles, dtype,
        scales_ECB=w.scales, outer_E=w.outer,
    )  # fmt: skip
    return out


def _wgrad(dy: Tensor, x: Tensor, reading: Reading, tiles: Any) -> Tensor:
    from unified_models.ops.grouped_linear import backward_triton as kernels

    rows, outer = gradients.rows_read(x, reading, tiles.counts_E)
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    out: Tensor = kernels.wgrad(gradients.taken(dy), rows, tiles, reading.grad_dtype, outer_E=outer)
    return out


@operator
def grouped_linear(
    x_PK: Tensor, counts_E: Sequence[int] | Tensor, *readings: Reading
) -> tuple[Tensor, ...]:
    """Rows of expert e times w[e].T, for each weight.

    x_PK: rows sorted by expert; counts_E: rows of each expert, summing to P, whole numbers or an int64 tensor on x's
    device; weights [E, N, K]; ValueError otherwise. On CUDA a tensor's sum is not checked: nothing waits for it.
    Each row has the bits that ops.linear would give it with its expert's matrix, but for block FP8 where DeepGEMM
    multiplies a large matrix that is no expert's: there it has those of `linear/narrow_triton.py`. Experts without rows
    get zero gradients.
    """
    if isinstance(counts_E, Tensor) and not x_PK.is_cuda:
        counts_E = counts_E.tolist()
    for reading in readings:
        check(x_PK, counts_E, reading)
    tiles = None
    if x_PK.is_cuda:
        from unified_models.ops.grouped_linear import triton as kernels

        if not isinstance(counts_E, Tensor):
            counts_E = torch.tensor(counts_E, dtype=torch.int64, device=x_PK.device)
        tiles = kernels.RowTiles(counts_E, len(x_PK))
    return tuple(
        apply(_GroupedLinear, x_PK, reading.master, reading, rows, counts_E, tiles)
        for reading, rows in zip(readings, arithmetic.inputs(x_PK, readings, counts_E), strict=True)
    )


def check(x_PK: Tensor, counts_E: Sequence[int] | Tensor, reading: Reading) -> None:
    """Refuse rows, counts and a weight that do not fit together: a product would drop or misread what is over."""
    if not isinstance(counts_E, Tensor):
        assert sum(counts_E) == len(x_PK), f"{sum(counts_E)} rows counted, {len(x_PK)} given"
    wanted, label = (len(counts_E), x_PK.shape[-1]), reading.weight.label
    if len(reading.shape) != 3 or (reading.shape[0], reading.shape[2]) != wanted:
        raise ValueError(
            f"{label}: {wanted[0]} experts and rows of {wanted[1]} channels for a weight of shape "
            f"{tuple(reading.shape)}, which must be [experts, N, channels]"
        )
