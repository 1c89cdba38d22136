"""Residual streams, rotary embedding and quantised rows on a GPU: right by a tolerance, or by bytes where those are
whole numbers; one token's bits whatever stands beside it, and gradients."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import compare_bits, parts, shifted, wide_rows
from unified_models.formats import activations
from unified_models.ops import (
    Rope,
    hyper_collapse,
    hyper_expand,
    hyper_maps,
    hyper_normalize,
    rope,
)
from unified_models.ops import quantize_triton as quantize
from unified_models.ops.rope import _rope as rotated_by_torch

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 1000)
PLACES = (0, 5, 196)
TOKENS = 1200
EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float32)
FLASH = Rope(64, 160000.0, 16.0, 32.0, 1.0, 65536)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype).cuda()


def close(got: Tensor, want: Tensor, off: float = 2e-5) -> None:
    """Two roundings to bfloat16, or float32 arithmetic, off the same on a CPU."""
    assert got.dtype == want.dtype
    off = off if got.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(got.cpu().double(), want.double(), rtol=off, atol=off)


def check(op: Callable[..., Any], *inputs: Tensor) -> None:
    """The bits of tokens in packs of every size and place, next to NaN, strided, at an odd address."""
    assert len(inputs[0]) == TOKENS
    whole, count = parts(op(*inputs)), 0
    packs = [slice(p, p + n) for n, p in itertools.product(ROWS, PLACES)]
    for part in packs:
        count += compare_bits(op(*(x[part] for x in inputs)), [x[part] for x in whole], str(part))
    kept = torch.arange(TOKENS).cuda() % 7 == 3
    dirty = [x.clone() for x in inputs]
    for x in dirty:
        if x.is_floating_point():
            x[~kept] = torch.nan
    got = [x[kept] for x in parts(op(*dirty))]
    count += compare_bits(got, [x[kept] for x in whole], "next to NaN")
    for layout in (wide_rows, shifted):
        count += compare_bits(op(*map(layout, inputs)), whole, layout.__name__)
    row = sum(x[0].numel() for x in whole)
    assert count > (len(PLACES) * sum(ROWS) + 2 * TOKENS) * row
    print(f"{count} values, none unequal")


def check_gradients(op: Callable[..., Any], *inputs: Tensor) -> None:
    """Values and gradients of the CPU's."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    on_cpu = [x.detach().cpu().requires_grad_() for x in inputs]
    outs, wants = parts(op(*leaves)), parts(op(*on_cpu))
    given = [torch.randn(want.shape).to(want.dtype) for want in wants]
    for got, want in zip(outs, wants, strict=True):
        close(got.detach(), want.detach())
    grads = torch.autograd.grad(outs, leaves, [g.cuda() for g in given])
    for got, truth in zip(grads, torch.autograd.grad(wants, on_cpu, given), strict=True):
        close(got / truth.abs().max().cuda(), truth / truth.abs().max(), 5e-5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("X", "M"), [(4, 4096), (4, 7168), (2, 96), (3, 77), (8, 8192), (1, 16)], ids=str
)
def test_streams(X: int, M: int, dtype: torch.dtype) -> None:
    streams, out = randn(TOKENS, X, M, dtype=dtype), randn(TOKENS, M, dtype=dtype)
    projected, pre = randn(TOKENS, X * (2 + X)), torch.rand(TOKENS, X).cuda()
    comb = torch.rand(TOKENS, X, X).cuda()
    check(lambda p, s: hyper_normalize(p, s, EPS), projected, streams)
    check(hyper_collapse, streams, pre)
    check(hyper_expand, out, streams, pre, comb)
    few = slice(0, 40)
    check_gradients(lambda p, s: hyper_normalize(p, s, EPS), projected[few], streams[few])
    check_gradients(hyper_collapse, streams[few], pre[few])
    check_gradients(hyper_expand, out[few], streams[few], pre[few], comb[few])
    views = out[:, None].expand(-1, X, -1)
    got = hyper_normalize(projected, views, EPS), hyper_collapse(views, pre)
    copies = hyper_normalize(projected, views.clone(), EPS), hyper_collapse(views.clone(), pre)
    print(f"{compare_bits(got, copies, 'equal streams')} values, none unequal")


def test_mixes_have_torchs_bits() -> None:
    """Written products and adds, none of them fused."""
    streams, out = randn(100, 4, 512, dtype=torch.bfloat16), randn(100, 512, dtype=torch.bfloat16)
    pre, comb = torch.rand(100, 4).cuda(), torch.rand(100, 4, 4).cuda()
    inputs = [x.cpu() for x in (out, streams, pre, comb)]
    count = compare_bits(hyper_collapse(streams, pre).cpu(), hyper_collapse(*inputs[1:3]), "y")
    count += compare_bits(hyper_expand(out, streams, pre, comb).cpu(), hyper_expand(*inputs), "X")
    print(f"{count} values, none unequal")


@pytest.mark.parametrize(("X", "iterations"), [(4, 20), (4, 1), (3, 20), (8, 4)], ids=str)
def test_maps(X: int, iterations: int) -> None:
    C = X * (2 + X)
    mixes, scale, base = 2 * randn(TOKENS, C), randn(3), randn(C)
    mixes[7, 2 * X :] = torch.randint(0, 2, (X * X,)).cuda() * 160.0 - 80

    def maps(mixes: Tensor, scale: Tensor, base: Tensor) -> tuple[Tensor, ...]:
        return hyper_maps(mixes, scale, base, streams=X, iterations=iterations, eps=EPS)

    check(lambda m: maps(m, scale, base), mixes)
    check_gradients(maps, torch.randn(40, C).cuda(), scale, base)
    assert all(bool(m.isfinite().all()) for m in maps(mixes, scale, base))


@pytest.mark.parametrize("inverse", [False, True], ids=["forward", "inverse"])
@pytest.mark.parametrize(
    ("shape", "table", "source", "dtype"),
    [
        ((64, 512), FLASH, torch.float32, torch.bfloat16),
        ((512,), FLASH, torch.bfloat16, torch.bfloat16),
        ((64, 128), FLASH, torch.bfloat16, torch.bfloat16),
        ((8, 128), Rope(128, 1e6, halves=True), torch.bfloat16, torch.bfloat16),
        ((3, 5, 13), Rope(8, 1e4), torch.float32, torch.float32),
    ],
    ids=str,
)
def test_rope(
    shape: tuple[int, ...], table: Rope, source: torch.dtype, dtype: torch.dtype, inverse: bool
) -> None:
    x = randn(TOKENS, *shape, dtype=source)
    positions = torch.randint(0, 1 << 20, (TOKENS,), dtype=torch.int32).cuda()
    positions[:4] = torch.tensor([0, 1, 105615, (1 << 20) - 1])

    def turn(x: Tensor, positions: Tensor) -> Tensor:
        return rope(x, positions, table, inverse=inverse, dtype=dtype)

    check(lambda x, p: turn(x, p[:, 0]), x, positions[:, None])
    few = positions[:40]
    check_gradients(lambda x: turn(x, few.to(x.device)), x[:40])
    wide = compare_bits(turn(x, positions.long()), turn(x, positions), "int64")
    unequal = turn(x, positions) != rotated_by_torch(x, positions, table, inverse, dtype)
    print(f"{wide} values; {int(unequal.sum())} of {unequal.numel()} differ from torch's")


def same_codes(got: Tensor, want: Tensor) -> int:
    """Equal bytes, where NaN is any NaN. The number of values."""
    got, want = got.float(), want.float()
    numbers = [torch.where(x.isnan(), torch.nan, x) for x in (got, want)]
    return compare_bits(*numbers, "codes")


def test_every_code() -> None:
    """Every bfloat16, and the float32 values halfway between two codes and an ulp to each side."""
    every = torch.arange(1 << 16).to(torch.uint16).view(torch.bfloat16).view(64, 1024)
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[~codes.isnan()].sort()[0]
    middle = ((codes[1:] + codes[:-1]) / 2).view(torch.int32)
    ties = torch.stack([middle + n for n in (-1, 0, 1)]).view(torch.float32)
    one, count = torch.tensor(1.0), 0
    for x in (every, every.float(), ties):
        for dtype in (*DTYPES, torch.float8_e4m3fn):
            got = quantize.static_codes(x.cuda(), one.cuda(), dtype).cpu()
            count += same_codes(got, activations.static_codes(x, one))
            got, scales = (y.cpu() for y in quantize.quantize_rows(x.cuda(), dtype))
            want = activations.quantize_rows(x)
            count += same_codes(got, want[0]) + compare_bits(scales, want[1], "scales")
    print(f"{count} values, none unequal")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("K", [1, 127, 576, 4096, 7168])
def test_quantized_rows(K: int, dtype: torch.dtype) -> None:
    x = randn(TOKENS, K, dtype=dtype) * torch.logspace(-20, 20, TOKENS)[:, None].cuda().to(dtype)
    scale, want = torch.rand(TOKENS, 1).cuda() + 0.01, activations.quantize_rows(x.cpu())
    count = 0
    for into in (*DTYPES, torch.float8_e4m3fn):
        codes, scales = quantize.quantize_rows(x, into)
        count += compare_bits((codes.cpu().float(), scales.cpu()), want, "the formats' bytes")
        codes = quantize.static_codes(x, scale, into)
        told = activations.static_codes(x.cpu(), scale.cpu())
        count += compare_bits(codes.cpu().float(), told, "static")
    check(quantize.quantize_rows, x)
    check(quantize.static_codes, x, scale)
    print(f"{count} values, none unequal")
