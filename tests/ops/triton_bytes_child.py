"""Rows and weights as DeepGEMM reads them: `TRITON_INTERPRET=1 python -m tests.ops.triton_bytes_child`.

The scales of the rows are those of the row-major form, elsewhere in memory. The stand-in for the library refuses what
its host code refuses or would copy first (sm_90, 128x128 blocks), and multiplies in float64.
"""

import itertools
import sys
from types import ModuleType

import torch
from torch import Tensor

from tests.ops.conftest import _make_weight as make_weight
from tests.ops.conftest import compare_bits
from unified_models.formats.activations import dequantized_rows
from unified_models.ops import quantize_triton as quantize
from unified_models.ops.linear import arithmetic, narrow

GROUP = 128
Pair = tuple[Tensor, Tensor]


def check_scales(scales: Tensor, codes: Tensor) -> None:
    """Of rows [G, T, K]: T beside each other, blocks T' apart, so that no launch turns them."""
    G, T, K = codes.shape
    assert scales.dtype == torch.float32 and scales.shape == (G, T, K // GROUP)
    apart = -(-T // 4) * 4
    assert scales.stride() == (apart * (K // GROUP), 1, apart)


def one_of_a_stack(scales: Tensor) -> Tensor:
    """[T, B] as [1, T, B]."""
    T, B = scales.shape
    return scales.as_strided((1, T, B), (scales.stride(1) * B, *scales.stride()))


def multiply(x: Pair, w: Pair, out: Tensor) -> None:
    """[G, T, K] times [G, N, K], into [G, T, N]."""
    check_scales(x[1], x[0])
    G, N, K = w[0].shape
    assert x[0].dtype == w[0].dtype == torch.float8_e4m3fn and out.dtype == torch.bfloat16
    assert x[0].stride(2) == w[0].stride(2) == out.stride(2) == 1
    assert x[0].stride(1) % 16 == w[0].stride(1) % 16 == out.stride(1) % 8 == 0
    assert all(t.data_ptr() % 16 == 0 for t in (*x, *w, out))
    assert w[1].shape == (G, -(-N // GROUP), K // GROUP) and w[1].is_contiguous()
    xs = x[1].double().repeat_interleave(GROUP, 2)
    ws = w[1].double().repeat_interleave(GROUP, 1)[:, :N].repeat_interleave(GROUP, 2)
    out.copy_((x[0].double() * xs) @ (w[0].double() * ws).transpose(1, 2))


def fp8_gemm_nt(x: Pair, w: Pair, out: Tensor) -> None:
    multiply((x[0][None], one_of_a_stack(x[1])), (w[0][None], w[1][None]), out[None])


def fp8_einsum(expression: str, x: Pair, w: Pair, out: Tensor) -> None:
    assert expression == "bhr,hdr->bhd"
    turned = [t.permute(1, 0, 2) for t in (*x, out)]
    multiply((turned[0], turned[1]), w, turned[2])


def check_rows() -> int:
    """The bytes of the row-major form, for rows of any number, of groups too, and any stride apart."""
    count = 0
    for T, K, dtype in itertools.product(
        (1, 3, 4, 17), (130, 256), (torch.bfloat16, torch.float32)
    ):
        for stack in ((), (1,), (3,)):
            memory = torch.randn(T, *stack, K + 24).to(dtype)
            x = memory[..., :K] * torch.logspace(-9, 9, K, dtype=dtype)
            want = quantize.quantize_rows(x, torch.float8_e4m3fn)
            codes, scales = quantize.quantize_rows(x, torch.float8_e4m3fn, tokens_last=True)
            compare_bits(codes.float(), want[0].float(), "codes")
            compare_bits(scales.contiguous(), want[1], "scales")
            held = scales.permute(1, 0, 2) if stack else one_of_a_stack(scales)
            check_scales(held, codes.view(T, -1, codes.shape[-1]).transpose(0, 1))
            count += 1
    none = quantize.quantize_rows(torch.ones(0, 2, 256), torch.float8_e4m3fn, tokens_last=True)
    assert (none[0].shape, none[1].shape) == ((0, 2, 256), (0, 2, 2))
    return count


def check_products() -> int:
    """Of a matrix and of groups, float32 and power-of-two scales: the values that a linear means."""
    count = 0
    for name, T, groups in itertools.product(
        ("fp8_ue8m0", "fp8_float32"), (1, 2, 7, 20), (1, 2, 3)
    ):
        N, K = 256, 384
        reading = make_weight(torch.randn(groups * N, K), name, groups=groups)()
        x = torch.randn(T, *((groups,) if groups > 1 else ()), K).bfloat16()
        codes, scales = quantize.quantize_rows(x, torch.float8_e4m3fn, tokens_last=True)
        w = reading.operand(arithmetic.block_bytes)
        assert w.w.data_ptr() == reading.packed["codes"].data_ptr()  # no copy
        rows = arithmetic.Input(codes, scales)
        assert rows.bytes
        got = arithmetic.products(rows, reading, torch.bfloat16)
        seen = dequantized_rows(x.flatten(0, -2)).double().view(T, groups, K)
        held = reading.dequantized().double().view(groups, N, K)
        want = torch.einsum("tgk,gnk->tgn", seen, held)
        want = want if groups > 1 else want[:, 0]
        torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-4)
        count += 1
    empty = narrow.deep_scaled_product(codes[:0], scales[:0], w.w, w.scales)
    assert empty.shape == (0, groups, N) and empty.dtype == torch.bfloat16
    return count


def main() -> None:
    torch.manual_seed(0)
    stand_in = ModuleType("deep_gemm")
    stand_in.fp8_gemm_nt, stand_in.fp8_einsum = fp8_gemm_nt, fp8_einsum  # type: ignore[attr-defined]
    sys.modules["deep_gemm"] = stand_in
    print(f"{check_rows() + check_products()} calls agree")


if __name__ == "__main__":
    main()
