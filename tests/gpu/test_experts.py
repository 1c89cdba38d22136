"""The kernels of experts on a GPU: choice, sort, grouped product, combine, without a wait and in a graph."""

import math

import pytest
import torch
from torch import Tensor

from tests.ops.conftest import _make_weight as make_weight
from tests.ops.conftest import compare_bits, nothing_waits
from unified_models.formats.weights import FORMATS
from unified_models.ops.activation import relu2
from unified_models.ops.choose import choose
from unified_models.ops.combine import combine, combine_sorted
from unified_models.ops.grouped_linear import grouped_linear
from unified_models.ops.linear import linear, narrow
from unified_models.ops.sort import by_expert
from unified_models.weight import Reading

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 1000)
COUNTS = ((1, 0, 1, 3), (40, 7, 0, 200), (0, 0, 2500, 9), (0, 1, 0, 0), (16, 32, 64, 128))


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape).cuda()


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (8, 8), (1, 1), (33, 6), (128, 8), (512, 22)])
def test_choose_is_that_of_the_cpu(experts: int, k: int) -> None:
    scores = torch.randn(1000, experts)
    scores[300:600] = (2 * scores[300:600]).round()
    scores[600:, : experts - k : 3] = math.nan
    want, count = choose(scores, k), 0
    for rows in ROWS:
        got = choose(scores[-rows:].cuda(), k)
        count += compare_bits(got.cpu(), want[-rows:], f"{rows} rows")
    few = torch.full((1, experts), math.nan).cuda()
    few[0, -1] = 1
    assert choose(few, k).tolist() == [[experts - 1, *range(k - 1)]]
    assert count == sum(ROWS) * k
    print(f"{count} choices, none unequal")


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (128, 8), (512, 22), (3, 1)])
def test_sort_is_that_of_the_cpu(experts: int, k: int) -> None:
    count = 0
    for rows in (*ROWS, 0, 9000):
        ids = torch.randint(0, experts, (rows, k))
        for got, want in zip(by_expert(ids.cuda(), experts), by_expert(ids, experts), strict=True):
            count += compare_bits(got.cpu(), want, f"{rows} rows", empty=rows == 0)
    assert count == 2 * (sum(ROWS) + 9000) * k + (len(ROWS) + 2) * experts
    print(f"{count} numbers, none unequal")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("slots", "width"), [(1, 33), (8, 2048), (22, 1024), (6, 2688)])
def test_combine_sorted_has_the_bits_of_combine(slots: int, width: int, dtype) -> None:
    y, gates = randn(1000 * slots, width).to(dtype), torch.rand(1000, slots).cuda()
    place, count = torch.randperm(1000 * slots).view(1000, slots).cuda(), 0
    for rows in ROWS:
        args = (place[-rows:], gates[-rows:])
        for out in (torch.bfloat16, torch.float32):
            got = combine_sorted(y, *args, out)
            want = combine(y[args[0]], args[1], dtype=out)
            count += compare_bits(got, want, f"{rows} rows")
    wide = torch.cat((y, y), 1)[:, :width]
    count += compare_bits(combine_sorted(wide, *args, out), got, "strided")
    assert count == (2 * sum(ROWS) + 1000) * width
    print(f"{count} values, none unequal")
    found = []
    for call in (
        lambda y, g: combine_sorted(y, place, g, dtype),
        lambda y, g: combine(y[place], g, dtype=dtype),
    ):
        leaves = (y.clone().requires_grad_(), gates.clone().requires_grad_())
        found.append(torch.autograd.grad(call(*leaves).float().square().sum(), leaves))
    (dy, dgates), (want_y, want_gates) = found
    compare_bits(dy, want_y, "gradients")
    scale = float(want_gates.abs().max())
    torch.testing.assert_close(dgates, want_gates, rtol=1e-5, atol=1e-5 * scale)


def stack(name: str, E: int, N: int, K: int) -> tuple[Reading, list[Reading]]:
    """A weight of E matrices, and each by itself with the same bytes."""
    w = torch.randn(E, N, K) / K**0.5
    whole = make_weight(w, name)
    singles = [make_weight(w[e], name) for e in range(E)]
    for e, single in enumerate(singles):
        if whole.input_scale is not None:
            single.input_scale.assign(whole.input_scale.master.detach()[e])
    return whole.cuda()(), [single.cuda()() for single in singles]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_rows_have_the_bits_of_a_linear(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    """By Triton, which multiplies all experts; whatever the counts, and so the tiles; next to rows of NaN of another
    expert."""
    monkeypatch.setattr(narrow, "deep_gemm_release", lambda: None)
    N, K = 720, 1024
    whole, singles = stack(name, 4, N, K)
    count = 0
    for counts in COUNTS:
        x = randn(sum(counts), K).to(dtype)
        numbers = torch.tensor(counts).cuda()
        (got,) = grouped_linear(x, numbers, whole)
        parts = x.split(counts)
        want = torch.cat([linear(p, r)[0] for p, r in zip(parts, singles, strict=True)])
        count += compare_bits(got, want, f"{name} {counts}")
        busy = max(range(4), key=counts.__getitem__)
        start = sum(counts[:busy])
        dirty = torch.full_like(x, torch.nan)
        dirty[start : start + counts[busy]] = parts[busy]
        (again,) = grouped_linear(dirty, numbers, whole)
        span = slice(start, start + counts[busy])
        count += compare_bits(again[span], got[span], "next to NaN")
    assert count == sum(sum(counts) + max(counts) for counts in COUNTS) * N
    print(f"{count} values, none unequal")


BYTES = (
    (64, 64, 128, 4, 3), (64, 128, 128, 4, 3),
    (16, 64, 128, 4, 4), (16, 128, 128, 8, 4), (32, 64, 128, 4, 3),
)  # fmt: skip
"""Tiles for weights of bytes, the first straight, the last three turned."""


@pytest.mark.parametrize("kind", ["bfloat16", "bytes", "blocks", "float32"])
@pytest.mark.parametrize(("N", "K"), [(768, 2048), (2048, 768), (1856, 2688)], ids=str)
def test_any_tile_gives_the_same_bits(kind: str, N: int, K: int) -> None:
    """All that are in the tables, and for bytes straight against turned; a linear's bits, for any number of rows."""
    from unified_models.ops.grouped_linear import triton as kernels

    whole = {name: t.cuda() for name, t in factors(kind, max(ROWS), N, K).items()}
    table = {"bfloat16": kernels.TILES, "float32": ((None, kernels.FLOAT_TILE),)}
    chosen = {tile for _, tile in table.get(kind, kernels.E4M3_TILES)}
    assert kind not in ("bytes", "blocks") or chosen < {*BYTES}
    tiles = BYTES if kind in ("bytes", "blocks") else sorted(chosen)
    want, count = of_a_linear(whole), 0
    for rows in ROWS:
        counts = (0, 1, rows - 1, 0)  # of expert 2, all but the first row
        found = {k: t if k in ("w_ENK", "ws_ECB") else t[:rows] for k, t in whole.items()}
        listed = kernels.RowTiles(torch.tensor(counts).cuda(), rows)
        first = None
        for tile in tiles:
            got = kernels.grouped_product(**found, tiles=listed, tile=tile)
            first = got if first is None else first
            count += compare_bits(got, first, f"{rows} rows, {tile}")
            if kind in ("bytes", "blocks"):
                half = found | {"x_PK": found["x_PK"].half()}
                got = kernels.grouped_product(**half, tiles=listed, tile=tile)
                compare_bits(got, first, f"{rows} rows in float16, {tile}")
            if rows > 1:
                compare_bits(got[1:], want[1:rows], f"a linear, {rows} rows, {tile}")
        compare_bits(kernels.grouped_product(**found, tiles=listed), first, "the chosen tile")
    assert count == len(tiles) * sum(ROWS) * N
    print(f"{count} values, none unequal")


def factors(kind: str, P: int, N: int, K: int) -> dict[str, Tensor]:
    """Rows and weights of four experts, as `grouped_product` takes them."""
    x, w = torch.randn(P, K), torch.randn(4, N, K)
    if kind == "float32":
        return {"x_PK": x, "w_ENK": w}
    if kind == "bfloat16":
        return {"x_PK": x.bfloat16(), "w_ENK": w.bfloat16()}
    e4m3 = torch.float8_e4m3fn
    found = {"x_PK": x.to(e4m3).bfloat16(), "w_ENK": w.to(e4m3)}
    if kind == "blocks":
        found |= {"xs_PB": torch.rand(P, K // 128), "ws_ECB": torch.rand(4, -(-N // 128), K // 128)}
    return found


def of_a_linear(found: dict[str, Tensor]) -> Tensor:
    """All rows with the matrix of expert 2, by the kernels of a linear."""
    from unified_models.ops.linear import narrow_triton
    from unified_models.ops.products_triton import product

    x, w = found["x_PK"], found["w_ENK"][2]
    if w.dtype == torch.float32:
        return product(x[None], w.t()[None])[0]
    if "xs_PB" not in found:
        return narrow_triton.product(x, w)
    ws_NB = found["ws_ECB"][2].repeat_interleave(128, 0)[: len(w)]
    return narrow_triton.scaled_product(x, found["xs_PB"], w, ws_NB)


def moe(x_TM: Tensor, scores_TE: Tensor, k: int, up: Reading, down: Reading) -> Tensor:
    """A layer of experts, as a context runs it."""
    ids_TK = choose(scores_TE, k)
    gates_TK = scores_TE.gather(-1, ids_TK)
    order_P, place_TK, counts_E = by_expert(ids_TK, scores_TE.shape[1])
    (hidden,) = grouped_linear(x_TM[order_P // k], counts_E, up)
    (y_PM,) = grouped_linear(relu2(hidden), counts_E, down)
    return combine_sorted(y_PM, place_TK, gates_TK, x_TM.dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_a_token_has_one_answer(name: str) -> None:
    """Of a whole layer, for any number of tokens beside it; nothing waits for the GPU."""
    (up, _), (down, _) = stack(name, 16, 256, 512), stack(name, 16, 512, 256)
    x, scores = randn(1000, 512).bfloat16(), randn(1000, 16)
    whole, count = moe(x, scores, 4, up, down), 0
    assert bool(whole.isfinite().all())
    with nothing_waits():
        found = [moe(x[-rows:], scores[-rows:], 4, up, down) for rows in ROWS]
    for rows, got in zip(ROWS, found, strict=True):
        count += compare_bits(got, whole[-rows:], f"{rows} rows")
    assert count == sum(ROWS) * 512
    print(f"{count} values, none unequal")


@pytest.mark.parametrize("rows", [1, 7, 100])
@pytest.mark.parametrize("name", ["bfloat16", "fp8_tensor", "fp8_ue8m0"])
def test_a_graph_follows_its_router(name: str, rows: int) -> None:
    """Captured once, replayed for tokens that choose other experts."""
    (up, _), (down, _) = stack(name, 16, 256, 512), stack(name, 16, 512, 256)
    x, scores = randn(rows, 512).bfloat16(), randn(rows, 16)
    moe(x, scores, 4, up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = moe(x, scores, 4, up, down)
    count = 0
    for _ in range(3):
        x.copy_(randn(rows, 512))
        scores.copy_(randn(rows, 16))
        graph.replay()
        count += compare_bits(out, moe(x, scores, 4, up, down), "a replay")
    assert count == 3 * rows * 512
    print(f"{count} values, none unequal")


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_the_cpu(name: str) -> None:
    weight, x = make_weight(torch.randn(4, 48, 128) / 11, name), torch.randn(19, 128)
    given, found = torch.randn(19, 48), []
    for device in ("cpu", "cuda"):
        reading = weight.to(device)()
        rows = x.to(device, copy=True).requires_grad_()
        (y,) = grouped_linear(rows, torch.tensor((3, 0, 15, 1), device=device), reading)
        grads = torch.autograd.grad(y, (rows, weight.master), given.to(y))
        found.append([t.detach().cpu().float() for t in (y, *grads)])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=2**-7, atol=1e-2)
