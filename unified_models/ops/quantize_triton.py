"""Activations in front of an FP8 linear, quantised in one pass: the bytes of `formats/activations.py`.

Maxima are those of whole numbers, scales are powers of two, and e4m3 is rounded to by two float32 adds: no order, no
tile and no GPU's own cast decides about a byte.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.formats.activations import GROUP
from unified_models.formats.rounding import AMAX_FLOOR, E4M3_MAX
from unified_models.ops.rows import rows_of

GROUPS = 16
"""Groups of 128 of a program."""
BLOCK = 2048
"""Values of a program with one scale a row."""
FLOOR, LARGEST = tl.constexpr(AMAX_FLOOR), tl.constexpr(E4M3_MAX)


@triton.jit
def _e4m3(x):
    """The e4m3 value next to float32 x, ties to even, beyond +-448 that; NaN stays NaN, a sign stays.

    Added to 1.5 * 2^20 times the power of two below it (2^-6 at least), |x| keeps its three bits after the first.
    """
    size = tl.abs(x)
    size = tl.where(size > LARGEST, LARGEST, size)
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.minimum(tl.maximum(exponent, 121 << 23), 135 << 23)  # 2^-6, 2^8
    shift = ((exponent + (20 << 23)) | 0x400000).to(tl.float32, bitcast=True)
    size = (size + shift) - shift
    sign = x.to(tl.int32, bitcast=True) & ~0x7FFFFFFF
    return (size.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def _stored(x, out_ptr):
    """e4m3 values as what out_ptr points to; as their bytes by whole numbers, for Triton 3.6's own cast of rows of one
    value writes others."""
    if out_ptr.dtype.element_ty == tl.uint8:
        bits = x.to(tl.int32, bitcast=True)
        size, small = bits & 0x7FFFFFFF, (tl.abs(x) * 512).to(tl.int32)
        code = tl.where(size < (121 << 23), small, (size >> 20) - (120 << 3))
        return (tl.where(x != x, 0x7F, code) | ((bits >> 24) & 0x80)).to(tl.uint8)
    else:
        return x.to(out_ptr.dtype.element_ty)


@triton.jit(do_not_specialize=["P", "stride_g", "stride_b", "stride_t"])
def _quantize_rows(
    x_ptr, codes_ptr, scales_ptr, P, stride, stride_g, stride_b, stride_t, STACK,
    K: tl.constexpr, PER_ROW: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Group p is number p % PER_ROW of row p // PER_ROW; what lies past K counts as 0. Row r is number r % STACK of
    token r // STACK, and only the place of its scales follows from that."""
    p = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    n = tl.arange(0, GROUP)
    k = (p % PER_ROW)[:, None] * GROUP + n[None, :]
    x_at = x_ptr + (p // PER_ROW)[:, None] * stride + k
    x = tl.load(x_at, mask=(p[:, None] < P) & (k < K), other=0.0).to(tl.float32)
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF  # ordered as the values are, NaN last
    amax = tl.max(size, axis=1).to(tl.float32, bitcast=True)
    ratio = tl.div_rn(tl.where(amax < FLOOR, FLOOR, amax), LARGEST)
    scale = (ratio.to(tl.int32, bitcast=True) + 0x7FFFFF) & ~0x7FFFFF  # the power of two above
    scale = scale.to(tl.float32, bitcast=True)
    codes = _e4m3(x * tl.div_rn(1.0, scale)[:, None])
    codes_at = codes_ptr + p[:, None] * GROUP + n[None, :]
    tl.store(codes_at, _stored(codes, codes_ptr), mask=p[:, None] < P)
    r = p // PER_ROW
    at = (r % STACK) * stride_g + (p % PER_ROW) * stride_b + (r // STACK) * stride_t
    tl.store(scales_ptr + at, scale, mask=p < P)


@triton.jit(do_not_specialize=["R"])
def _static_codes(
    x_ptr, scale_ptr, codes_ptr, R, stride, stride_scale,
    K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """codes[r, k] = x[r, k] * (1 / scale[r]), rounded to e4m3."""
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    k = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (r[:, None] < R) & (k[None, :] < K)
    x = tl.load(x_ptr + r[:, None] * stride + k[None, :], mask=inside, other=0.0).to(tl.float32)
    factor = tl.div_rn(1.0, tl.load(scale_ptr + r * stride_scale, mask=r < R, other=1.0))
    codes = _stored(_e4m3(x * factor[:, None]), codes_ptr)
    tl.store(codes_ptr + r[:, None] * K + k[None, :], codes, mask=inside)


def _storage(codes: Tensor) -> Tensor:
    return codes.view(torch.uint8) if codes.dtype == torch.float8_e4m3fn else codes


def quantize_rows(
    x: Tensor, dtype: torch.dtype = torch.bfloat16, *, tokens_last: bool = False
) -> tuple[Tensor, Tensor]:
    """e4m3 code values [..., K'] in `dtype` and float32 scales [..., K'/128], K' = K rounded up to 128 (zero-filled).

    x: [..., K] in bfloat16 or float32, rows any stride apart; dtype: bfloat16, float16, float32 or float8_e4m3fn.
    tokens_last: x is [T, K] or [T, G, K], and the scales lie in memory as [K'/128, T'] or [G, K'/128, T'], T' = T
    rounded up to a multiple of 4, as DeepGEMM loads them; what is returned has their usual shape, as a view. Nothing
    writes the scales past T, and no row reads them.
    """
    *rows, K = x.shape
    B = triton.cdiv(K, GROUP)
    codes = torch.empty(*rows, B * GROUP, dtype=dtype, device=x.device)
    if tokens_last:
        T, *stack = rows
        memory = torch.empty(*stack, B, -(-T // 4) * 4, dtype=torch.float32, device=x.device)
        scales = memory[..., :T].movedim(-1, 0)
        G, strides = (stack[0] if stack else 1), [scales.stride(d) for d in (-2, -1, 0)]
    else:
        scales = torch.empty(*rows, B, dtype=torch.float32, device=x.device)
        G, strides = 1, [0, 1, B]
    if codes.numel():
        flat = rows_of(x)
        P = len(flat) * B
        _quantize_rows[(triton.cdiv(P, GROUPS),)](
            flat, _storage(codes), scales, P, flat.stride(0), *strides, G, K, B, GROUP, GROUPS,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scales


def static_codes(x: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """e4m3 code values of x * (1 / scale), clamped to +-448, [..., K] in `dtype`.

    x: [..., K] in bfloat16 or float32, rows any stride apart; scale: float32 [], or [T, 1] of x [T, K].
    """
    codes = torch.empty(x.shape, dtype=dtype, device=x.device)
    if codes.numel():
        flat, K = rows_of(x), x.shape[-1]
        held = scale.expand(len(flat), 1)
        columns = min(triton.next_power_of_2(K), BLOCK)
        rows = BLOCK // columns
        _static_codes[(triton.cdiv(len(flat), rows), triton.cdiv(K, columns))](
            flat, held, _storage(codes), len(flat), flat.stride(0), held.stride(0), K, rows, columns,
            num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return codes
