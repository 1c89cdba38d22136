"""The convolution over a pack of whole sequences on a GPU, forward and backward by kernels."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.pages import Pages, Sequences


class _ConvPack(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, taps_CK: Tensor, bias_C: Tensor | None, base_S: Tensor, who: Any
    ) -> Tensor:
        from unified_models.ops.conv.triton import conv

        ctx.save_for_backward(x_TC, taps_CK, who.sequence_T)
        ctx.bias = None if bias_C is None else bias_C.dtype
        old = Pages.flat(x_TC, base_S)
        all_old = dataclasses.replace(who, past_S=who.total_S)
        out: Tensor = conv(x_TC, old, taps_CK.contiguous(), bias_C, all_old)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from unified_models.ops.conv.backward_triton import conv_backward

        x_TC, taps_CK, sequence_T = ctx.saved_tensors
        dx, dtaps, dbias = conv_backward(grads[0], x_TC, taps_CK, sequence_T)
        given = None if ctx.bias is None else dbias.to(ctx.bias)
        return dx, dtaps.to(taps_CK.dtype), given, None, None


def conv_pack(
    x_TC: Tensor, taps_CK: Tensor, bias_C: Tensor | None, base_S: Tensor, who: Sequences
) -> Tensor:
    """`conv` of each sequence's own rows, float32 [T, C]. x: a row a token, those of sequence s from base_S[s] on, and
    none of earlier steps."""
    return apply(_ConvPack, x_TC, taps_CK, bias_C, base_S, who)
