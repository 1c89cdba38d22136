"""The products of a backward in Triton's interpreter: `TRITON_INTERPRET=1 python -m
tests.ops.triton_grouped_backward_child`.

dX and dW of a linear and of experts against float64 autograd of the reference, on poisoned memory; an expert's in any
company.
"""

import itertools
import math
from typing import Any

import torch
from torch import Tensor

from tests.conftest import poisoning
from tests.ops.conftest import EPS, compare_bits
from tests.ops.conftest import _make_weight as make_weight
from unified_models.formats.weights import FORMATS
from unified_models.ops import grouped_linear as grouped
from unified_models.ops.grouped_linear import backward_triton as experts
from unified_models.ops.grouped_linear.reference import grouped_linear as reference
from unified_models.ops.grouped_linear.triton import RowTiles
from unified_models.ops.linear import backward_triton as kernels
from unified_models.ops.linear import gradients, narrow

BF, F32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
COUNTS = ((1, 0, 1, 3), (0, 0, 0, 1), (40, 7, 0, 33), (0, 0), (130, 2))
"""Rows of each expert."""
TILE, OTHER = (64, 64, 64, 4, 4), (32, 128, 32, 4, 2)
LARGE = 2.0**40


def among_nan(x: Tensor, wide: int = 16) -> Tensor:
    """x in rows that lie further apart than they are long, NaN between them."""
    memory = torch.full((*x.shape[:-1], x.shape[-1] + wide), math.nan).to(x.dtype)
    memory[..., : x.shape[-1]] = x
    return memory[..., : x.shape[-1]]


def spread(scales: Tensor, N: int, K: int) -> Tensor:
    return scales.repeat_interleave(128, -2).repeat_interleave(128, -1)[..., :N, :K]


def assert_near(got: Tensor, want: Tensor, parts: Tensor, terms: int) -> int:
    """Float32 sums of `terms` products, whose absolute values add up to `parts`, and one rounding to got's dtype."""
    own = torch.finfo(got.dtype).eps  # the interpreter cuts where a GPU rounds
    bound = own * want.abs() + terms * EPS * parts + 1e-30
    assert got.shape == want.shape
    error = ((got.double() - want).abs() / bound).max() if got.numel() else 0.0
    assert error <= 1, f"{got.dtype}, {terms} terms: {float(error):.3g} times the bound"
    return 1


def rows(kind: torch.dtype, *shape: int) -> Tensor:
    """Of values that bfloat16 holds only where that is their dtype, a few of them huge or tiny."""
    x = torch.randn(*shape)
    x[::5] *= LARGE
    x[1::5] /= LARGE
    return x.to(kind)


def weight(kind: str, *shape: int) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """What a kernel reads, its scales and outer scale by name, and the values."""
    N, K = shape[-2:]
    w, stack = torch.randn(shape), shape[:-2]
    if kind == "float32":
        return w, {}, w.double()
    if kind == "bfloat16":
        return w.bfloat16(), {}, w.bfloat16().double()
    codes = w.to(E4M3)
    if kind == "outer":
        outer = torch.rand(stack)
        return codes, {"outer": outer}, codes.double() * outer.double()[..., None, None]
    scales = torch.rand(*stack, -(-N // 128), -(-K // 128))
    wide = torch.full((*shape[:-1], scales.shape[-1] * 128), math.nan).to(E4M3)
    wide[..., :K] = codes
    return wide, {"scales": scales}, codes.double() * spread(scales, N, K).double()


KINDS = (
    (BF, "bfloat16"), (BF, "blocks"), (BF, "outer"), (BF, "float32"),
    (F32, "bfloat16"), (F32, "blocks"), (F32, "outer"),
)  # fmt: skip
"""dtype of dY, and the weight."""


def check_linear() -> int:
    """dX, in rows that may lie apart, and dW, whole and in parts. float32 loses nothing of a float32 operand."""
    count = 0
    for (T, N, K), (dtype, kind) in itertools.product(
        ((70, 150, 200), (1, 16, 40), (3, 21, 7)), KINDS
    ):
        dy = among_nan(rows(dtype, T, N))
        w, scales, values = weight(kind, N, K)
        want, size = dy.double() @ values, dy.double().abs() @ values.abs()
        named = {"scales_CB" if name == "scales" else name: x for name, x in scales.items()}
        for tile, out_dtype in ((None, F32), (OTHER, BF))[T > 60 :]:
            memory = torch.full((T, K + 5), 7, dtype=out_dtype)
            kernels.dgrad(dy, w, memory[:, :K], tile=tile, **named)
            count += assert_near(memory[:, :K], want, size, N)
            assert bool((memory[:, K:] == 7).all())
    for (T, N, K), (a, b) in itertools.product(
        ((150, 70, 40), (1, 16, 130), (2100, 5, 7), (0, 3, 4)), ((BF, BF), (F32, BF), (BF, F32))
    ):
        dy, x = among_nan(rows(a, T, N)), among_nan(rows(b, T, K))
        want, size = dy.double().T @ x.double(), dy.double().abs().T @ x.double().abs()
        outer = torch.rand(())
        for tile, parts in ((None, None), (TILE, 3)):
            for out_dtype in (F32, BF):
                got = kernels.wgrad(dy, x, out_dtype, tile=tile, parts=parts)
                count += assert_near(got, want, size, T + 8)
            got = kernels.wgrad(dy, x, F32, outer, tile=tile, parts=parts)
            count += assert_near(got, want * outer, size * outer, T + 9)
    assert kernels.parts_of(128, 2688, 16384, (128, 128, 64)) == 12
    assert kernels.parts_of(10304, 2688, 16384, (128, 128, 64)) == 1
    return count + 2


def truths(dy: Tensor, x: Tensor, w: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    """dX and dW by autograd of the reference in float64, and the same of absolute values."""
    found: list[Tensor] = []
    for change in (Tensor.double, lambda t: t.double().abs()):
        leaves = change(x).requires_grad_(), change(w).requires_grad_()
        found += torch.autograd.grad(reference(leaves[0], counts, leaves[1]), leaves, change(dy))
    return tuple(found)


def check_experts() -> int:
    count = 0
    for counts, (dtype, kind) in itertools.product(COUNTS, (*KINDS, (F32, "float32"))):
        (P, E), (N, K) = (sum(counts), len(counts)), (150, 200) if kind == "blocks" else (21, 40)
        dy, tiles = rows(dtype, P, N), RowTiles(torch.tensor(counts), P)
        w, scales, values = weight(kind, E, N, K)
        x = among_nan(rows(F32 if kind == "float32" else BF, P, K))
        want_x, want_w, size_x, size_w = truths(dy, x, values, counts)
        named: dict[str, Any] = {
            {"scales": "scales_ECB", "outer": "outer_E"}[name]: s for name, s in scales.items()
        }
        for tile, out_dtype in ((None, F32), (OTHER, BF))[P > 80 :]:
            got = experts.dgrad(dy, w, K, tiles, out_dtype, tile=tile, **named)
            count += assert_near(got, want_x, size_x, N)
            got = experts.wgrad(dy, x, tiles, out_dtype, tile=tile)
            count += assert_near(got, want_w, size_w, P + 8)
        outer = torch.rand(E)
        got = experts.wgrad(dy, x, tiles, F32, outer_E=outer)
        each = outer.double()[:, None, None]
        count += assert_near(got, want_w * each, size_w * each, P + 9)
    return count


def check_company() -> int:
    """An expert's gradients beside rows of NaN of another, and without those."""
    counts, (N, K) = (40, 7, 0, 33), (21, 40)
    dy, x, w = torch.randn(80, N).bfloat16(), torch.randn(80, K).bfloat16(), torch.randn(4, N, K)
    w, tiles = w.bfloat16(), RowTiles(torch.tensor(counts), 80)
    dx = experts.dgrad(dy, w, K, tiles, BF, tile=TILE)
    dw = experts.wgrad(dy, x, tiles, F32)
    dirty_dy, dirty_x = dy.clone(), x.clone()
    dirty_dy[40:47], dirty_x[40:47] = math.nan, math.nan
    again = experts.dgrad(dirty_dy, w, K, tiles, BF, tile=TILE)
    compare_bits((again[:40], again[47:]), (dx[:40], dx[47:]), "dX next to NaN")
    again = experts.wgrad(dirty_dy, dirty_x, tiles, F32)
    assert bool(again[1].isnan().all())
    compare_bits((again[0], again[2:]), (dw[0], dw[2:]), "dW next to NaN")
    alone = experts.wgrad(dy[:40], x[:40], RowTiles(torch.tensor([40]), 40), F32)
    compare_bits(alone[0], dw[0], "dW alone")
    assert bool((dw[2] == 0).all())
    return 3


def check_pieces() -> int:
    """What is said of three pieces, and its control: two of them lose a third of the bits."""
    x = rows(F32, 1000, 7)
    high = x.bfloat16()
    middle = (x - high.float()).bfloat16()
    low = (x - high.float() - middle.float()).bfloat16()
    assert torch.equal(high.double() + middle.double() + low.double(), x.double())
    assert not torch.equal(high.double() + middle.double(), x.double())
    return 1


def check_readings() -> int:
    """Rows as kernels read them are those that the product saw, without a rounding; so are bytes and block scales."""
    count, counts = 0, (3, 0, 18)
    for name in ("bfloat16", "fp8_ue8m0", "fp8_float32", "mxfp4", "fp8_tensor", "nvfp4"):
        for N, K in ((256, 128), (144, 224)):
            x = torch.randn(21, K).bfloat16()
            single = make_weight(torch.randn(N, K), name)()
            got, outer = gradients.rows_read(x, single)
            assert got.dtype == BF
            scale = 1.0 if outer is None else outer
            compare_bits(got.float() * scale, single.seen(x), name)
            stack = make_weight(torch.randn(3, N, K), name)()
            got, outer = gradients.rows_read(x, stack, counts)
            scales = torch.ones(3) if outer is None else outer
            each = scales.repeat_interleave(torch.tensor(counts))[:, None]
            spans = zip(x.split(counts), range(3), strict=True)
            want = torch.cat([stack.seen(part, e) for part, e in spans])
            compare_bits(got.float() * each, want, name)
            count += 2
            if name.startswith("fp8_") and name != "fp8_tensor":
                for reading in (single, stack):
                    read = gradients.factor(reading)
                    assert read.scales is not None and read.outer is None
                    values = read.w[..., :K].float() * spread(read.scales, N, K)
                    compare_bits(values.view(reading.shape), reading.dequantized(), name)
                    count += 1
            elif name != "fp8_tensor":
                held = narrow.values(stack).float()
                held = held * (stack.packed["global"][:, None, None] if name == "nvfp4" else 1)
                torch.testing.assert_close(held, stack.dequantized(), rtol=3 * EPS, atol=0)
                count += 1
    return count


def check_formats() -> int:
    """Both gradients of a linear and of experts, from readings in every format, as the operators ask for them."""
    count, counts, (N, K) = 0, (3, 0, 18), (144, 224)
    x, tiles = torch.randn(21, K).bfloat16(), RowTiles(torch.tensor(counts), 21)
    for name in FORMATS:
        stack, single = (make_weight(torch.randn(*e, N, K), name)() for e in ((3,), ()))
        dy = torch.randn(21, N).to(stack.format.activation)
        dx = grouped._dgrad(dy, stack, tiles, BF)
        dw = grouped._wgrad(dy, x, stack, tiles)
        assert (dx.dtype, dw.dtype) == (BF, F32)
        w, start = stack.dequantized().double(), 0
        for e, each in enumerate(counts):
            rows, seen = dy[start : start + each].double(), x[start : start + each]
            seen = stack.seen(seen, e).double()
            size = rows.abs() @ w[e].abs()
            count += assert_near(dx[start : start + each], rows @ w[e], size, N)
            count += assert_near(dw[e], rows.T @ seen, rows.abs().T @ seen.abs(), 32)
            start += each
        if name == "float32":
            continue  # torch multiplies a linear's
        read, wide = gradients.factor(single), dy.double()
        w, seen = single.dequantized().double(), single.seen(x).double()
        out = torch.empty(21, K)
        gradients._dgrad(dy, *read.matrix(0), out)
        count += assert_near(out, wide @ w, wide.abs() @ w.abs(), N)
        got = gradients._wgrad(dy, *gradients.rows_read(x, single), F32)
        count += assert_near(got, wide.T @ seen, wide.abs().T @ seen.abs(), 32)
    return count


def main() -> None:
    torch.manual_seed(0)
    torch.empty = poisoning(torch.empty)
    count = check_linear() + check_experts() + check_company() + check_pieces() + check_readings()
    count += check_formats()
    print(f"{count} calls agree")


if __name__ == "__main__":
    main()
