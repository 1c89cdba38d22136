"""Hyper-connections, a kernel for each operator. Sums over streams are written adds, and no product is fused with an
add, as in torch's expressions. The one tree is that of the mean square."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from unified_models.ops.rows import LANE, lane_of, rows_of

TOKENS = 2
"""Tokens of a program of maps: one warp holds so many 4 x 4 matrices, a row a thread."""
BLOCK = 1024
"""Channels of a program that collapses or expands."""
SQUARES = 2048
"""Running sums of squares of a token."""


@triton.jit(do_not_specialize=["steps_t", "steps_x"])
def _normalize(
    projected_ptr, streams_ptr, out_ptr, stride, steps_t, steps_x, eps,
    X: tl.constexpr, M: tl.constexpr, C: tl.constexpr, LANE: tl.constexpr,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """out[t] = projected[t] rsqrt(mean(streams[t]^2) + eps); a token every steps_t * LANE elements, a stream every
    steps_x * LANE. Channels m, m + WIDTH, ... of all streams are one running sum, and those one tree."""
    t = tl.program_id(0).to(tl.int64)
    m = tl.arange(0, WIDTH)
    at = streams_ptr + t * (steps_t * LANE) + m
    squares = tl.zeros((WIDTH,), dtype=tl.float32)
    for start in range(0, M, WIDTH):
        for x in tl.static_range(X):
            part = at + (x * (steps_x * LANE) + start)
            value = tl.load(part, mask=m < M - start, other=0.0).to(tl.float32)
            squares += value * value
    mean = tl.div_rn(tl.sum(squares, axis=0), 1.0 * (X * M))
    c = tl.arange(0, CHANNELS)
    projected = tl.load(projected_ptr + t * stride + c, mask=c < C, other=0.0)
    tl.store(out_ptr + t * C + c, projected * tl.rsqrt(mean + eps), mask=c < C)


@triton.jit
def _affine(mixes, base, scale, n, inside):
    """mixes[n] scale + base[n], 0 outside."""
    mix = tl.load(mixes + n, mask=inside, other=0.0)
    return mix * scale + tl.load(base + n, mask=inside, other=0.0)


@triton.jit
def _sigmoid(x):
    return tl.div_rn(1.0, 1 + tl.exp(-x))


@triton.jit
def _sums(b, lines, axis: tl.constexpr, X: tl.constexpr):
    """The sum of b over an axis, first to last: whatever the tree, a line among zeros is the line itself. lines: each
    element's place on the axis; those from X on are not read."""
    total = tl.sum(tl.where(lines == 0, b, 0.0), axis=axis)
    for x in tl.static_range(1, X):
        total += tl.sum(tl.where(lines == x, b, 0.0), axis=axis)
    return tl.expand_dims(total, axis)


@triton.jit(do_not_specialize=["T"])
def _maps(
    mixes_ptr, scale_ptr, base_ptr, pre_ptr, post_ptr, comb_ptr, T, stride, eps,
    X: tl.constexpr, ITERATIONS: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """pre, post and comb of TOKENS tokens; WIDTH is X rounded up to a power of two."""
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    x = tl.arange(0, WIDTH)
    inside = (t[:, None] < T) & (x[None, :] < X)
    row, out = mixes_ptr + t[:, None] * stride, t[:, None] * X + x[None, :]
    pre = _affine(row, base_ptr, tl.load(scale_ptr), x[None, :], inside)
    post = _affine(row, base_ptr, tl.load(scale_ptr + 1), X + x[None, :], inside)
    tl.store(pre_ptr + out, _sigmoid(pre) + eps, mask=inside)
    tl.store(post_ptr + out, 2 * _sigmoid(post), mask=inside)

    t = t[:, None, None]
    i, j = x[None, :, None], x[None, None, :]
    inside = (t < T) & (i < X) & (j < X)
    place = 2 * X + i * X + j
    b = _affine(mixes_ptr + t * stride, base_ptr, tl.load(scale_ptr + 2), place, inside)
    top = tl.max(tl.where(j < X, b, float("-inf")), axis=2)
    b = tl.exp(b - tl.expand_dims(top, 2))
    b = tl.div_rn(b, _sums(b, j, 2, X)) + eps
    b = tl.div_rn(b, _sums(b, i, 1, X) + eps)
    for _ in range(ITERATIONS - 1):
        b = tl.div_rn(b, _sums(b, j, 2, X) + eps)
        b = tl.div_rn(b, _sums(b, i, 1, X) + eps)
    tl.store(comb_ptr + t * (X * X) + i * X + j, b, mask=inside)


@triton.jit
def _collapse(
    streams_ptr, pre_ptr, out_ptr, stride_t, stride_x,
    X: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[t, m] = sum_i pre[t, i] streams[t, i, m], first to last."""
    t = tl.program_id(0).to(tl.int64) // BLOCKS
    m = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    at = streams_ptr + t * stride_t + m
    total = tl.load(at, mask=m < M, other=0.0).to(tl.float32) * tl.load(pre_ptr + t * X)
    for i in tl.static_range(1, X):
        stream = tl.load(at + i * stride_x, mask=m < M, other=0.0).to(tl.float32)
        total += stream * tl.load(pre_ptr + t * X + i)
    tl.store(out_ptr + t * M + m, total.to(out_ptr.dtype.element_ty), mask=m < M)


@triton.jit
def _expand(
    y_ptr, streams_ptr, post_ptr, comb_ptr, out_ptr, stride_y, stride_t, stride_x,
    X: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """out[t, j, m] = post[t, j] y[t, m] + sum_i comb[t, i, j] streams[t, i, m], first to last."""
    t = tl.program_id(0).to(tl.int64) // BLOCKS
    m = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    j = tl.arange(0, WIDTH)
    y = tl.load(y_ptr + t * stride_y + m, mask=m < M, other=0.0).to(tl.float32)
    post = tl.load(post_ptr + t * X + j, mask=j < X, other=0.0)
    mixed = y[None, :] * post[:, None]
    at = streams_ptr + t * stride_t + m
    for i in tl.static_range(X):
        stream = tl.load(at + i * stride_x, mask=m < M, other=0.0).to(tl.float32)
        comb = tl.load(comb_ptr + (t * X + i) * X + j, mask=j < X, other=0.0)
        mixed += stream[None, :] * comb[:, None]
    at = out_ptr + (t * X + j[:, None]) * M + m[None, :]
    tl.store(at, mixed.to(out_ptr.dtype.element_ty), mask=(j[:, None] < X) & (m[None, :] < M))


def hyper_normalize(projected_TC: Tensor, streams_TXM: Tensor, eps: float) -> Tensor:
    """projected * rsqrt(mean(streams^2) + eps), float32 [T, C]. projected: float32 [T, C]; streams: [T, X, M] in
    bfloat16 or float32, at any strides."""
    (T, C), (_, X, M) = projected_TC.shape, streams_TXM.shape
    out = torch.empty(T, C, dtype=torch.float32, device=streams_TXM.device)
    if out.numel() == 0:
        return out
    lane, projected_TC = lane_of(M), rows_of(projected_TC)
    streams = streams_TXM if whole(streams_TXM, lane) else streams_TXM.contiguous()
    if not whole(streams, lane):
        streams = streams.clone(memory_format=torch.contiguous_format)
    steps = [stride // lane for stride in streams.stride()[:2]]
    width = min(max(triton.next_power_of_2(M), 16), SQUARES)
    _normalize[(T,)](
        projected_TC, streams, out, projected_TC.stride(0), *steps, eps,
        X, M, C, lane, width, triton.next_power_of_2(C),
        num_warps=max(width // 256, 1), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def whole(streams_TXM: Tensor, lane: int) -> bool:
    """Whether every stream begins at a multiple of a lane, counted from an address that is a multiple of 16 bytes: what
    a kernel may assume of memory decides which values a thread adds."""
    steps = zip(streams_TXM.shape[:2], streams_TXM.stride()[:2], strict=True)
    even = all(size == 1 or stride % lane == 0 for size, stride in steps)
    return even and streams_TXM.stride(2) == 1 and streams_TXM.data_ptr() % LANE == 0


def hyper_maps(
    mixes_TC: Tensor, scale_3: Tensor, base_C: Tensor, X: int, iterations: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """pre [T, X], post [T, X] and comb [T, X, X], float32. mixes: float32 [T, C], rows any stride apart; scale [3] and
    base [C]: float32."""
    T = len(mixes_TC)
    shapes = ((T, X), (T, X), (T, X, X))
    pre, post, comb = (torch.empty(s, dtype=torch.float32, device=mixes_TC.device) for s in shapes)
    if T:
        rows = rows_of(mixes_TC)
        _maps[(triton.cdiv(T, TOKENS),)](
            rows, scale_3.contiguous(), base_C.contiguous(), pre, post, comb,
            T, rows.stride(0), eps, X, iterations, TOKENS, triton.next_power_of_2(X),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return pre, post, comb


def hyper_collapse(streams_TXM: Tensor, pre_TX: Tensor) -> Tensor:
    """sum_i pre_i X_i, [T, M] in the streams' dtype. streams: [T, X, M] at any strides; pre: float32 [T, X]."""
    T, X, M = streams_TXM.shape
    out = torch.empty(T, M, dtype=streams_TXM.dtype, device=streams_TXM.device)
    if out.numel() == 0:
        return out
    streams = streams_TXM if streams_TXM.stride(2) == 1 else streams_TXM.contiguous()
    blocks, block, warps = blocks_of(M)
    _collapse[(T * blocks,)](
        streams, pre_TX.contiguous(), out, streams.stride(0), streams.stride(1),
        X, M, blocks, block, num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def hyper_expand(out_TM: Tensor, streams_TXM: Tensor, post_TX: Tensor, comb_TXX: Tensor) -> Tensor:
    """post_j out + sum_i comb[i, j] X_i, [T, X, M] in the streams' dtype. out: [T, M], rows any stride apart; streams:
    [T, X, M] at any strides; post [T, X] and comb [T, X, X]: float32."""
    T, X, M = streams_TXM.shape
    mixed = torch.empty(T, X, M, dtype=streams_TXM.dtype, device=streams_TXM.device)
    if mixed.numel() == 0:
        return mixed
    streams = streams_TXM if streams_TXM.stride(2) == 1 else streams_TXM.contiguous()
    y, (blocks, block, warps) = rows_of(out_TM), blocks_of(M)
    _expand[(T * blocks,)](
        y, streams, post_TX.contiguous(), comb_TXX.contiguous(), mixed,
        y.stride(0), streams.stride(0), streams.stride(1),
        X, M, blocks, block, triton.next_power_of_2(X),
        num_warps=warps, enable_fp_fusion=False,
    )  # fmt: skip
    return mixed


def blocks_of(M: int) -> tuple[int, int, int]:
    """Programs of a token, the channels of each, and its warps."""
    block = min(max(triton.next_power_of_2(M), 16), BLOCK)
    return triton.cdiv(M, block), block, max(block // 256, 1)
