"""Every Triton kernel compiled for Hopper, on a machine without a GPU: `python -m tests.ops.compile_child`.

The interpreter runs what the compiler refuses. Here the operators' own launchers launch nothing: what they would launch
is compiled down to machine code, and never loaded. Their arguments are tensors without memory, of the sizes of real
models. Prints each kernel's variants, with the registers and the spilled bytes that ptxas names.
"""

import contextlib
import io
import re
import tempfile
from collections import defaultdict
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError
from triton.runtime.jit import JITFunction

from tests.ops.compile_attend import backward_attention, backward_latent
from tests.ops.compile_products import backward_products, backward_rows
from tests.ops.compile_scan import backward_scan
from unified_models.formats.records import LatentFP8, VectorFP8
from unified_models.ops import pages_triton as pages
from unified_models.ops import products_triton as products
from unified_models.ops import quantize_triton as quantize
from unified_models.ops import records_triton as records
from unified_models.ops import sums_triton as sums
from unified_models.ops.activation import triton as activation
from unified_models.ops.attend import triton as attend
from unified_models.ops.attend_latent import triton as latent
from unified_models.ops.choose.triton import choose
from unified_models.ops.combine.triton import combine, spread
from unified_models.ops.compress import triton as compress
from unified_models.ops.conv.triton import conv
from unified_models.ops.gated_norm.triton import gated_norm
from unified_models.ops.grouped_linear import triton as grouped
from unified_models.ops.hyper_connect import triton as hyper
from unified_models.ops.linear import narrow_triton as narrow
from unified_models.ops.linear import split_triton as split
from unified_models.ops.pages import FLAT, Pages, Sequences
from unified_models.ops.rms_norm.triton import rms_norm
from unified_models.ops.rope import Rope
from unified_models.ops.rope.triton import rope
from unified_models.ops.router_scores.triton import route_weights
from unified_models.ops.scan import triton as scan
from unified_models.ops.scan.places import Places
from unified_models.ops.select import triton as select
from unified_models.ops.sort.triton import by_expert

SHARED = 227 << 10
"""Bytes of shared memory that a program on Hopper may ask for."""
THREADS = 1024


class Hopper:
    """A driver for a GPU that is not there: what a compilation asks of one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Variant:
    """A compiled kernel. spilled: bytes that a thread stores for want of registers."""

    kernel: Any
    registers: int
    spilled: int

    def __str__(self) -> str:
        told = self.kernel.metadata
        return (
            f"{told.num_warps} warps, {told.num_stages} stages, {told.shared} bytes shared, "
            f"{self.registers} registers, {self.spilled} bytes spilled"
        )


def compile_only() -> dict[Any, dict[str, Variant]]:
    """From here on a launch compiles, anew in this process, and does nothing else. The variants of each kernel, by
    hash, as they come."""
    triton.runtime.driver.set_active(Hopper())
    triton.knobs.nvidia.dump_ptxas_log = True
    compiled: dict[Any, dict[str, Variant]] = defaultdict(dict)
    run = JITFunction.run

    def compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            kernel = run(self, *args, grid=grid, warmup=True, **options)
        if kernel.hash not in compiled[self]:
            compiled[self][kernel.hash] = measured(self, kernel, log.getvalue())
        return kernel

    JITFunction.run = compile
    return compiled


def measured(kernel: Any, made: Any, log: str) -> Variant:
    """What ptxas said about it. AssertionError: a GPU would not load it, or it did not come from ptxas."""
    name, told = kernel.fn.__qualname__, made.metadata
    registers, spilled = (
        [int(n) for n in re.findall(pattern, log)]
        for pattern in (r"Used (\d+) registers", r"(\d+) bytes spill stores")
    )
    assert len(registers) == len(spilled) == 1, f"{name}: {log}"
    assert made.asm["cubin"][:4] == b"\x7fELF", name
    assert told.shared <= SHARED, f"{name}: {told.shared} bytes of shared memory"
    assert told.num_warps * 32 <= THREADS, f"{name}: {told.num_warps} warps"
    return Variant(made, registers[0], spilled[0])


@triton.jit
def _early(x, KIND: tl.constexpr):
    if x > 0:
        return x
    return x.to(KIND)


@triton.jit
def _control(x_ptr, KIND: tl.constexpr):
    tl.store(x_ptr, _early(tl.load(x_ptr), KIND))


@triton.jit
def _too_much(x_ptr, ROWS: tl.constexpr):
    a = tl.arange(0, ROWS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.zeros((ROWS, ROWS), dtype=tl.float32)
    for _ in range(16):
        x = tl.load(x_ptr + a)
        total = tl.dot(x, x, total)
        x_ptr += ROWS * ROWS
    tl.store(x_ptr + a, total.to(tl.bfloat16))


def causes(error: BaseException | None) -> list[BaseException]:
    return [] if error is None else [error, *causes(error.__cause__)]


def check_refusals() -> None:
    """Controls: an early return of another type, and more shared memory than there is, do not pass."""
    x = torch.empty(1 << 20, dtype=torch.int32)
    _control[(1,)](x, tl.int32)
    try:
        _control[(1,)](x, tl.float32)
    except CompilationError as error:
        assert "return type" in str(causes(error)).lower(), error
    else:
        raise AssertionError("an early return of another type was compiled")
    try:
        _too_much[(1,)](x.to(torch.bfloat16), 128, num_stages=8, num_warps=8)
    except AssertionError as error:
        assert "shared memory" in str(error), error
    else:
        raise AssertionError("no GPU has so much shared memory")


BF, F16, F32, E4M3 = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn
INT, LONG, BYTE = torch.int32, torch.int64, torch.uint8
T, S = 33, 3


def many(*shape: int, dtype: torch.dtype = F32, wide: int = 0) -> Tensor:
    """Rows that lie `wide` values further apart than they are long."""
    return torch.empty(*shape[:-1], shape[-1] + wide, dtype=dtype)[..., : shape[-1]]


def whole(*shape: int) -> Tensor:
    return many(*shape, dtype=INT)


def who() -> Sequences:
    return Sequences(whole(T), whole(T), whole(S + 1), whole(S), whole(S))


def paged(
    row: int, dtype: torch.dtype, per_page: int = 16, *, start: int = 0, ring: int = FLAT, gap: int = 0
) -> Pages:  # fmt: skip
    page = min(per_page, ring) * row + gap
    return Pages(many(8, page, dtype=dtype), whole(S, 5), per_page, page, row, start, ring)


def flat(row: int, dtype: torch.dtype, start: int = 0) -> Pages:
    return Pages.flat(many(99, row, dtype=dtype), whole(S), start)


def linears() -> None:
    """Of both models' widths: 21 and 32 blocks of scales, and one."""
    x, w = many(T, 2688, dtype=BF), many(10304, 2688, dtype=BF)
    for dtype in (BF, F32):
        for _, tile in (*narrow.TILES, (0, narrow.FEWER)) if dtype == BF else narrow.TILES[:1]:
            narrow.product(x, w, dtype, tile)
        for _, tile in narrow.E4M3_TILES:
            narrow.product(x, w.to(E4M3), dtype, tile)
            for B in (21, 32, 1) if dtype == BF else (32,):
                codes, scales = many(T, B * 128, dtype=BF), many(T, B)
                weight = many(4096, B * 128, dtype=E4M3), many(4096, B)
                narrow.scaled_product(codes, scales, *weight, dtype, tile)
    for a, b, dtype in ((F32, F32, F32), (BF, F32, F32), (F32, BF, BF)):
        split.product(many(T, 16384, dtype=a), many(24, 16384, dtype=b), dtype)
    products.product(many(2, T, 128), many(2, 128, 256))
    for N in (1, 6, 131072):
        sums.row_sum(many(T, N))
        sums.running_sum(many(T, N))


def experts() -> None:
    """128 experts of 1856 x 2688 and 256 of 2048 x 4096: bfloat16, float32, or codes with an outer scale (as bfloat16
    or float16), with scales of blocks, or with neither."""
    P = 6 * T
    for E, N, K in ((128, 1856, 2688), (256, 2048, 4096)):
        tiles = grouped.RowTiles(many(E, dtype=LONG), P)
        w, x, outer = many(E, N, K, dtype=E4M3), many(P, K, dtype=BF), many(E)
        scales = {"xs_PB": many(P, K // 128), "ws_ECB": many(E, -(-N // 128), K // 128)}
        kinds: list[tuple[Any, Any, dict[str, Any]]] = [(x, w, scales)]
        if E == 128:
            half = many(P, K, dtype=F16)
            kinds += [(x, w, {"outer_E": outer}), (half, w, {"outer_E": outer})]
            plain = many(E, N, K, dtype=BF)
            kinds += [(x, plain, {}), (x, plain, {"outer_E": outer}), (x, plain, {"dtype": F32})]
            grouped.grouped_product(x.to(F32), many(E, N, K), tiles)
        for rows, weight, rest in kinds:
            for _, tile in grouped.TILES if weight.dtype == BF else grouped.E4M3_TILES:
                how = {"dtype": BF} | rest
                grouped.grouped_product(rows, weight, tiles, tile=tile, **how)
        for k in (6, 1):
            scores, ids = many(T, E), many(T, k, dtype=LONG)
            choose(scores, k)
            route_weights(scores, ids, 2.5)
            _, place, _ = by_expert(ids, E)
            for dtype in (BF, F32):
                combine(many(P, K, dtype=dtype), place, many(T, k), BF)
                spread(many(T, K, dtype=dtype), many(T * k, dtype=LONG), k)


def attention() -> None:
    """32 heads over 2 of 128 channels, a token a tile and several, of all keys and of a window."""
    scales = many(1)[0], many(1)[0]
    for dtype, kept, place, keep in (
        (BF, BF, paged, None), (BF, BF, flat, 128), (F32, F32, paged, None),
        (BF, BYTE, paged, None),
    ):  # fmt: skip
        k, v = place(512, kept), place(512, kept, start=256)
        for tile in (1, None):
            attend.attend(
                many(T, 32, 128, dtype=dtype), k, v, who(), scale=0.1, keep=keep, groups=2,
                most=8192, scales=scales if kept == BYTE else None, tile=tile,
            )  # fmt: skip


def latent_attention() -> None:
    """64 heads over rows of 512: a window alone, with a pool that is read whole, and with 512 picks of one."""
    alone: dict[str, Any] = {}
    whole_pool, picked = {"count_T": whole(T)}, {"picks_TK": many(T, 512, dtype=LONG)}
    each = (alone, whole_pool, picked)
    cases: list[tuple[Any, int, Pages, Pages, tuple[dict[str, Any], ...]]] = [
        (BF, 0, flat(512, BF), flat(512, BF), (picked,)),
        (F32, 0, flat(512, F32), flat(512, F32), (alone, picked)),
        (BF, 0, paged(512, BF, 64), paged(512, BF), (picked,)),
    ]
    for row, gap, some in ((592, 0, each), (585, 3, (picked,))):
        window, pool = paged(row, BYTE, 64, gap=gap, ring=32), paged(row, BYTE, gap=gap)
        cases.append((BF, 64, window, pool, some))  # 16 bytes at once, and one
    for dtype, rope_dims, window, pool, some in cases:
        for how in some:
            latent.attend_latent(
                many(T, 64, 512, dtype=dtype), window, who(), scale=0.1, keep=128,
                sinks_H=None if how is alone else many(64), rope=rope_dims,
                pool=None if how is alone else pool, most_entries=8192, **how,
            )  # fmt: skip


def entries() -> None:
    """Windows of 4 that overlap and of 128, of 512 and 128 channels; their records, and the choice of 512."""
    sequence, number = whole(T), whole(T)
    for stride, dim in ((4, 512), (4, 128), (128, 512)):
        compress.closing(who(), T, stride)
        C = dim * (2 if stride == 4 else 1)
        opens = [paged(2 * C, F32, 128, ring=8), flat(2 * C, F32)]
        places = ((0, opens[0]), (16, opens[1]), (1, paged(2 * C + 1, F32)))
        for wide, open in places if C == 1024 else places[:1]:
            compress.compress(
                many(T, C, wide=wide), many(T, C, wide=wide), open, who(), sequence, number,
                stride=stride, overlap=stride == 4, dim=dim, bias=many(stride, C),
                norm=many(dim), eps=1e-6, rope_=Rope(64, 1e4, halves=wide == 1),
            )  # fmt: skip
    for record, dim in ((VectorFP8(), 128), (LatentFP8(64), 512)):
        size = record.size(dim)
        for dtype in (BF, F32):
            rows = many(T, dim, dtype=dtype)
            records.encode(rows, record)
            for out in (BF, F32):
                records.round_trip(rows, record, out)
            for to in (paged(size, BYTE, 64), paged(-(-size // 16) * 16, BYTE, 64, ring=32)):
                records.write_records(to, rows, record, sequence, number, whole(S))
    for kept, row in ((BYTE, 132), (BYTE, 144), (BYTE, 133), (BF, 128), (F32, 128)):
        q, keys = many(T, 64, 128, dtype=F32 if kept == F32 else BF), paged(row, kept)
        for most in (64, 65536):
            select.select(q, many(T, 64), keys, who(), whole(T), 512, most)


def codes() -> None:
    """Of rows in two dtypes, into each, with a scale for all and one a row; rows of one value."""
    for dtype, K in ((BF, 2688), (F32, 4096), (BF, 1)):
        x = many(T, K, dtype=dtype)
        for out in (BF, F16, F32, E4M3):
            quantize.quantize_rows(x, out)
            quantize.static_codes(x, many(T, 1) if dtype == F32 else many(1)[0], out)
        quantize.static_codes(x, many(T, 1), E4M3)
        quantize.quantize_rows(x, E4M3, tokens_last=True)
        quantize.quantize_rows(many(T, 8, K, dtype=dtype), E4M3, tokens_last=True)


def scans() -> None:
    """64 heads of 64 x 128, one and four of a program, over pages and flat; a convolution of 6144 channels."""
    H, P, G, N, Q, x, b = 64, 64, 8, 128, 128, 4096, 1024
    for dtype, states in ((BF, F32), (F32, F32)):
        for place in (paged, flat) if dtype == BF else (paged,):
            rows = [place(n, kind) for n, kind in ((x, dtype), (H, F32), (b, dtype))]
            if place is paged:
                rows = [replace(one, per_page=Q) for one in rows]
            kept = [Pages(many(4, x * N, dtype=k), whole(S, 5), 1, x * N, 0) for k in (states, dtype)]  # fmt: skip
            of = Places((*rows, *kept), (H, P, N), G, Q)
            for wide, heads in product((0, 1) if place is paged and dtype == BF else (0,), (1, 4)):
                c = many(T, b, dtype=dtype, wide=wide).unflatten(1, (G, N))
                scan.scan(of, c, many(H), many(H), who(), scan.tiles(who(), T, Q), heads)
        for old in (paged(6144, dtype, Q, ring=4), flat(6144, dtype)):
            for bias in (many(6144), None):
                conv(many(T, 6144, dtype=dtype), old, many(6144, 4), bias, who())
    conv(many(T, 1), flat(1, F32), many(1, 4), None, who())


def rows_and_streams() -> None:
    """Norms, activations, rope, four streams of 4096, and rows into pages."""
    for dtype in (BF, F32):
        for N in (2688, 4096, 1024, 512, 128):
            rms_norm(many(T, N, dtype=dtype), many(N), 1e-6, dtype)
        rms_norm(many(T, 512, dtype=dtype), None, 1e-6, dtype)
        rms_norm(many(T, 4096, dtype=dtype), many(4096), 1e-6, F32)
        gated_norm(many(T, 4096, dtype=dtype), many(T, 4096, dtype=dtype, wide=16), many(4096), 1e-5, 8)  # fmt: skip
        for N in (3712, 1) if dtype == BF else (64,):
            x = many(T, N, dtype=dtype)
            for kind in ("sigmoid", "softplus", "sqrt_softplus", "relu2"):
                getattr(activation, kind)(x)
            activation.silu(x, dtype)
            activation.time_step(x, many(N), 1e-3, 1e-1)
            for limit in (10.0, None):
                activation.swiglu(x, many(T, N, dtype=dtype, wide=N), limit)
        shapes = ((600, 64, 512), (T, 64, 512), (T, 512), (T, 64, 128), (T, 64))
        for shape in shapes if dtype == BF else shapes[:1]:
            for kind, halves, inverse in ((LONG, False, False), (INT, True, True)):
                at = many(shape[0], dtype=kind)
                rope(many(*shape, dtype=dtype), at, many(32), halves, inverse, dtype)
        streams, mixes = many(T, 4, 4096, dtype=dtype), many(T, 24)
        hyper.hyper_normalize(mixes, streams, 1e-6)
        pre, post, comb = hyper.hyper_maps(mixes, many(3), many(24), 4, 20, 1e-6)
        hyper.hyper_collapse(streams, pre)
        hyper.hyper_expand(many(T, 4096, dtype=dtype), streams, post, comb)
        for widths in ((4096,), (256, 256), (4096, 64, 1024)):
            to = [paged(n, dtype, 128, ring=4) for n in widths]
            pages.write(who(), to, [many(T, n, wide=n % 3) for n in widths])
            pages.write(who(), [flat(n, dtype) for n in widths], [many(T, n, dtype=dtype) for n in widths])  # fmt: skip
    pages.owners(whole(S + 1), whole(S), T)


CASES = (
    linears, experts, attention, latent_attention, entries, codes, scans, rows_and_streams,
    backward_attention, backward_latent, backward_products, backward_rows, backward_scan,
)  # fmt: skip


def main() -> None:
    assert not triton.knobs.runtime.interpret, "the interpreter compiles nothing"
    with tempfile.TemporaryDirectory() as folder, torch.device("meta"):
        triton.knobs.cache.dir = folder
        compiled = compile_only()
        check_refusals()
        compiled.clear()
        for case in CASES:
            case()
    for kernel, variants in compiled.items():
        print(f"{kernel.module}.{kernel.fn.__name__}")
        for variant in variants.values():
            print(f"    {variant}")
    print(f"{len(compiled)} kernels, {sum(map(len, compiled.values()))} variants compiled")


if __name__ == "__main__":
    main()
