"""The kernels of a backward, for `tests.ops.compile_child`: products, and what a token computes by itself."""

import torch

from unified_models.ops.activation.backward_triton import derivative
from unified_models.ops.combine.backward_triton import combine_backward
from unified_models.ops.conv.backward_triton import conv_backward
from unified_models.ops.gated_norm.backward_triton import gated_norm_backward
from unified_models.ops.grouped_linear import backward_triton as experts
from unified_models.ops.grouped_linear.triton import RowTiles
from unified_models.ops.linear import backward_triton as linears
from unified_models.ops.logprob.backward_triton import logprobs_backward
from unified_models.ops.rms_norm.backward_triton import rms_norm_backward

BF, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn


def backward_products() -> None:
    """Of Nemotron's widest linear, its router and head, of DeepSeek's blocks, and of 128 experts of 1856 x 2688."""
    T, N, K, E = 33, 1856, 2688, 128
    for dy, w, blocks in (
        (BF, BF, False), (BF, E4M3, False), (BF, E4M3, True), (BF, F32, False),
        (F32, BF, False), (F32, E4M3, True), (F32, F32, False),
    ):  # fmt: skip
        each = (2, 33) if (dy, w) == (BF, BF) else (33,)
        for rows in each:  # of an expert: tiles of 64, and of 128
            P = rows * E * 4
            tiles = RowTiles(torch.empty(E, dtype=torch.int64), P)
            scales = torch.empty(E, 15, 21) if blocks else None
            outer = torch.empty(E) if w == E4M3 and not blocks else None
            of_rows, x = torch.empty(P, N, dtype=dy), torch.empty(P, K, dtype=w)
            weight = torch.empty(E, N, K, dtype=w)
            how = {"scales_ECB": scales, "outer_E": outer}
            experts.dgrad(of_rows, weight, K, tiles, BF, **how)
            if w != E4M3:
                experts.wgrad(of_rows, x, tiles, F32)
            elif outer is not None:
                experts.wgrad(of_rows, x.to(BF), tiles, BF, outer_E=outer)
            if dy == w == F32:
                continue
            out, scale = torch.empty(T, K, dtype=BF), None if scales is None else scales[0]
            rows_T = torch.empty(T if rows == 33 else 999, N, dtype=dy)
            out = torch.empty(len(rows_T), K, dtype=BF)
            linears.dgrad(rows_T, weight[0], out, scale, None if outer is None else outer[0])
            if w != E4M3:
                linears.wgrad(rows_T, torch.empty(len(rows_T), K, dtype=w), F32)
    for tall in (torch.empty(16384, 128), torch.empty(16384, 33, dtype=BF)):
        linears.wgrad(tall, torch.empty(16384, K, dtype=BF), BF, torch.empty(1)[0])


def backward_rows() -> None:
    """Norms, activations, combine, convolution and logprobs at the widths of both models."""
    T = 33
    for dtype in (BF, F32):
        for N in (2688, 4096):
            x, dy = torch.empty(T, N, dtype=dtype), torch.empty(T, N, dtype=dtype)
            weight = torch.empty(N)
            rms_norm_backward(dy, x, weight, 1e-6)
            rms_norm_backward(dy, x, None, 1e-6)
            gated_norm_backward(dy, x, x, weight, 1e-5, 8)
            derivative("relu2", dy, x)
            derivative("silu", dy, x.float())
            derivative("swiglu", dy, x, x, 10.0 if N == 4096 else None)
            place, gates = torch.empty(T, 6, dtype=torch.int64), torch.empty(T, 6)
            combine_backward(dy, torch.empty(6 * T, N, dtype=dtype), place, gates)
        rows, sequence = torch.empty(T, 6144, dtype=dtype), torch.empty(T, dtype=torch.int32)
        conv_backward(torch.empty(T, 6144), rows, torch.empty(6144, 4), sequence)
    each, ids = torch.empty(T), torch.empty(T, dtype=torch.int64)
    for V in (131072, 129280, 50257):
        for temperature in (each, None):
            logprobs_backward(each, torch.empty(T, V), temperature, ids, each)
