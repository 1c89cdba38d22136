"""The kernels of experts in Triton's interpreter: `TRITON_INTERPRET=1 python -m tests.ops.triton_experts_child`.

Choice, sort, grouped product and combine against what CPU computes, on poisoned memory; a row's bits in any company.
"""

import itertools
import math

import torch
from torch import Tensor

from tests.conftest import poisoning
from tests.ops.conftest import _make_weight as make_weight
from tests.ops.conftest import compare_bits
from unified_models.ops import quantize_triton
from unified_models.ops.choose import triton as choices
from unified_models.ops.choose.reference import choose as chosen
from unified_models.ops.combine import combine
from unified_models.ops.combine import triton as combines
from unified_models.ops.grouped_linear import grouped_linear
from unified_models.ops.grouped_linear import triton as grouped
from unified_models.ops.linear import arithmetic, narrow_triton
from unified_models.ops.products_triton import product
from unified_models.ops.sort import by_expert
from unified_models.ops.sort import triton as sorts

COUNTS = ((1, 0, 1, 3), (0, 0, 0, 1), (40, 7, 0, 33), (0, 0), (130, 2))
"""Rows of each expert."""
STRAIGHT = ((64, 32, 128, 4, 2),)
TURNED = ((32, 128, 128, 8, 3),)
"""Tiles beside the chosen ones. Of bytes, one below 64 rows is computed as w @ x.T."""


def check_choices() -> int:
    """Random scores, ties, zeros of both signs, NaN; and rows with too few numbers, by the rule that README states."""
    count = 0
    for E, k in ((8, 2), (8, 8), (1, 1), (33, 6), (512, 22)):
        scores = torch.randn(6, E)
        scores[2:4] = (2 * scores[2:4]).round() * torch.tensor([1.0, -1.0])[:, None]
        scores[4, : E - k : 3] = math.nan
        scores[5, 1:] = -math.nan
        want = [chosen(row, k) for row in scores[:5]]
        want.append([0, *range(1, k)])
        assert choices.choose(scores, k).tolist() == want
        assert choices.choose(scores[3:4], k).tolist() == want[3:4]
        wide = torch.full((6, E + 5), math.inf)
        wide[:, :E] = scores
        assert choices.choose(wide[:, :E], k).tolist() == want
        count += 3
    edge = torch.tensor([[math.nan, -0.0, 0.0, 1e-45, -1e-45, math.inf, -math.inf, 3e38, -3e38]])
    assert choices.choose(edge, 9).tolist() == [[5, 7, 3, 1, 2, 4, 8, 6, 0]]
    return count + 1


def check_sorts() -> int:
    count = 0
    for T, K, E in ((1, 1, 1), (1, 6, 8), (70, 8, 33), (300, 2, 5), (0, 2, 4)):
        ids = torch.randint(0, E, (T, K))
        for block in (128, sorts.BLOCK):
            for got, want in zip(sorts.by_expert(ids, E, block), by_expert(ids, E), strict=True):
                assert torch.equal(got, want), f"{T} tokens, {E} experts"
            count += 1
    return count


def check_combines() -> int:
    count = 0
    for T, K, M in ((1, 1, 5), (7, 6, 100), (3, 2, 1100)):
        place = torch.randperm(T * K).view(T, K)
        for dtype in (torch.bfloat16, torch.float32):
            memory = torch.full((T * K, M + 3), math.nan, dtype=dtype)
            memory[:, :M] = torch.randn(T * K, M)
            y, gates = memory[:, :M], torch.rand(T, K)
            got = combines.combine(y, place, gates, torch.float32)
            compare_bits(got, combine(y[place], gates, dtype=torch.float32), f"{T} tokens")
            one = combines.combine(y, place[-1:], gates[-1:], torch.float32)
            compare_bits(one, got[-1:], "one token")
            x, order = memory[:T, :M], place.flatten().argsort()
            compare_bits(combines.spread(x, order, K), x[order // K], "rows of experts")
            count += 3
    return count


def check_tiles() -> int:
    """The list of tiles covers each row once, by its expert's; the rest is marked."""
    count = 0
    for counts in COUNTS:
        for rows in (16, 64):
            P, E = sum(counts), len(counts)
            tiles = grouped.RowTiles(torch.tensor(counts), P).of(rows).tolist()
            assert len(tiles) == P // rows + min(E, P)
            want, start = [], 0
            for e, each in enumerate(counts):
                want += [[e, first, start + each] for first in range(start, start + each, rows)]
                start += each
            assert tiles[: len(want)] == want
            assert all(tile[0] == -1 for tile in tiles[len(want) :])
            count += 1
    return count


def operands(P: int, E: int, kind: str) -> dict[str, Tensor]:
    """Rows and weights of a kind of product. x lies among NaN where its rows may."""
    N, K = (150, 256) if kind == "blocks" else (21, 40)
    memory = torch.full((P, K + 16), math.nan)
    memory[:, :K] = torch.randn(P, K).to(torch.float8_e4m3fn).float()
    x, w = memory.bfloat16()[:, :K], torch.randn(E, N, K)
    if kind == "float32":
        return {"x_PK": memory[:, :K], "w_ENK": w}
    if kind == "bfloat16":
        return {"x_PK": x, "w_ENK": w.bfloat16()}
    found = {"x_PK": x, "w_ENK": w.to(torch.float8_e4m3fn)}
    if kind == "blocks":
        return found | {"xs_PB": torch.rand(P, 2), "ws_ECB": torch.rand(E, 2, 2)}
    return found | {"outer_E": torch.rand(E)}


def alone(found: dict[str, Tensor], e: int, span: slice) -> Tensor:
    """Rows of one expert by the kernels of a linear."""
    x, w = found["x_PK"][span], found["w_ENK"][e]
    if x.dtype == torch.float32:
        return product(x[None], w.t()[None])[0]
    if "xs_PB" in found:
        ws_NB = found["ws_ECB"][e].repeat_interleave(128, 0)[: len(w)]
        return narrow_triton.scaled_product(x, found["xs_PB"][span], w, ws_NB)
    out = narrow_triton.product(x, w)
    return out * found["outer_E"][e] if "outer_E" in found else out


def check_products() -> int:
    """What the kernels of a linear give each expert's rows, in any tile; numpy has bits of its own."""
    count = 0
    for counts in COUNTS:
        P, E = sum(counts), len(counts)
        for kind in ("float32", "bfloat16", "blocks", "outer"):
            found = operands(P, E, kind)
            tiles = grouped.RowTiles(torch.tensor(counts), P)
            got = grouped.grouped_product(**found, tiles=tiles)
            assert got.shape == (P, found["w_ENK"].shape[1])
            start = 0
            for e, each in enumerate(counts):
                span = slice(start, start + each)
                if each:
                    want = alone(found, e, span)
                    torch.testing.assert_close(got[span], want, rtol=1e-5, atol=1e-4)
                    count += 1
                start += each
            rounded = grouped.grouped_product(**found, tiles=tiles, dtype=torch.bfloat16)
            torch.testing.assert_close(rounded.float(), got, rtol=2**-7, atol=1e-6)
            others = TURNED if kind in ("blocks", "outer") else STRAIGHT
            for other in others:
                again = grouped.grouped_product(**found, tiles=tiles, tile=other)
                torch.testing.assert_close(again, got, rtol=1e-5, atol=1e-4)
            count += 1 + len(others)
    return count


def check_blocks() -> int:
    """A block-FP8 weight's own bytes and scales, of sides that are no whole blocks."""
    count = 0
    for name, (N, K) in itertools.product(("fp8_ue8m0", "fp8_float32"), ((256, 128), (150, 200))):
        reading, counts = make_weight(torch.randn(3, N, K) / K**0.5, name)(), (3, 0, 18)
        x = torch.randn(21, K).bfloat16()
        held = reading.operand(arithmetic.block_bytes)
        assert held.scales is not None and held.scales.shape == (3, -(-N // 128), -(-K // 128))
        if K == 128:
            assert held.w.data_ptr() == reading.packed["codes"].data_ptr()  # no copy
        codes, scales = quantize_triton.quantize_rows(x)
        tiles = grouped.RowTiles(torch.tensor(counts), 21)
        (want,) = grouped_linear(x, counts, reading)
        for tile in (None, *STRAIGHT, *TURNED):
            got = grouped.grouped_product(
                codes, held.w, tiles, xs_PB=scales, ws_ECB=held.scales, tile=tile
            )
            torch.testing.assert_close(got, want.float(), rtol=2**-7, atol=1e-4)
            count += 1
    return count


def main() -> None:
    torch.manual_seed(0)
    torch.empty = poisoning(torch.empty)
    count = check_choices() + check_sorts() + check_combines() + check_tiles() + check_products()
    count += check_blocks()
    print(f"{count} calls agree")


if __name__ == "__main__":
    main()
