"""Records, entries and the indexer's choice on a device, at full sizes: right by a tolerance, and one row's bits
whatever stands beside it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.ops import triton_entries_child as child
from tests.ops.conftest import compare_bits
from unified_models.formats.records import LatentFP8, Record, VectorFP8
from unified_models.ops.compress import compress, compress_pages
from unified_models.ops.pages import Pages, Sequences
from unified_models.ops.records_triton import encode, round_trip
from unified_models.ops.rope import Rope
from unified_models.ops.select import select_pages, top
from unified_models.ops.select import triton as kernels

ROWS = (1, 2, 3, 7, 16, 17, 33, 64, 100, 256, 1000)
PLACES = (0, 5, 196)
ROPE = Rope(64, 160000.0, 16.0, original_max_position_embeddings=65536)


def test_small_sizes_in_pages() -> None:
    assert child.main() == 530348


@pytest.mark.parametrize(("record", "D"), [(VectorFP8(), 128), (LatentFP8(64), 512)], ids=str)
def test_records(record: Record, D: int) -> None:
    """The bytes of the CPU's, NaN among them, in packs of every size and place."""
    count = 0
    for dtype in (torch.float32, torch.bfloat16):
        rows = child.hostile(1200, D, dtype)
        data = record.encode(rows)
        whole, back = encode(rows.cuda(), record), round_trip(rows.cuda(), record)
        count += compare_bits(whole.cpu(), data, "bytes")
        count += compare_bits(back.cpu(), record.decode(data, D), "read back")
        for n in ROWS:
            for p in PLACES:
                part = rows[p : p + n].cuda()
                count += compare_bits(encode(part, record), whole[p : p + n], f"{n} from {p}")
        rows[::3] = math.nan
        dirty = encode(rows.cuda(), record)
        for place in (1, 2):
            count += compare_bits(dirty[place::3], whole[place::3], "next to NaN")
        assert bool(round_trip(rows.cuda(), record)[::3].isnan().all())
    assert count > 2 * len(PLACES) * sum(ROWS) * record.size(D)
    print(f"{count} values, none unequal")


def step(lengths: list[int], past: list[int]) -> Sequences:
    with torch.device("cuda"):
        return child.sequences(lengths, past)


KINDS = [(4, True, 512), (4, True, 128), (128, False, 512)]


@pytest.mark.parametrize(("stride", "overlap", "dim"), KINDS, ids=str)
def test_entries(stride: int, overlap: bool, dim: int) -> None:
    """Sequences of every length in one pack: the CPU's by a tolerance; by bits each sequence alone, and its last tokens
    after others that lie in pages."""
    T, span, C = sum(ROWS), stride * (2 if overlap else 1), dim * (2 if overlap else 1)
    kv, gate, bias = (torch.randn(n, C).cuda() for n in (T, T, stride))
    norm = (1 + 0.2 * torch.randn(dim)).cuda()
    args = {"dim": dim, "norm": norm, "eps": 1e-6, "rope_": ROPE}
    shape = {"stride": stride, "overlap": overlap, "bias": bias}
    who, starts = step(list(ROWS), [0] * len(ROWS)), [sum(ROWS[:s]) for s in range(len(ROWS))]
    nothing = Pages.flat(torch.full((1, 2 * C), math.nan).cuda(), who.past_S)
    whole, sequence, number = compress_pages(kv, gate, nothing, who, **shape, **args)
    there = sequence >= 0
    assert int(there.sum()) == sum(n // stride for n in ROWS)
    index = (number.long()[:, None] + 1) * stride + torch.arange(-span, 0).cuda()
    index = torch.where(index < 0, -1, index + who.starts_S1[sequence.long()][:, None])[there]
    rows = torch.cat((kv, gate + bias[who.position_T.long() % stride]), 1)
    want = compress(
        rows.cpu(), index.cpu(), **(args | {"norm": norm.cpu()}), positions_U=number[there].cpu().long() * stride
    )  # fmt: skip
    torch.testing.assert_close(whole[there].cpu(), want, rtol=1e-4, atol=1e-4)
    count = 0
    for s, n in enumerate(ROWS):
        own = whole[sequence == s]
        for past in sorted({0, 1, n // 2, n - 1} - {n}):
            at = slice(starts[s] + past, starts[s] + n)
            for shift in (0, 1):  # the second: open rows at an odd address
                line = torch.full((n, 2 * C + shift), math.nan).cuda()
                line[:past, shift:] = rows[starts[s] : starts[s] + past]
                alone = step([n - past], [past])
                open = Pages.flat(line, torch.zeros_like(alone.past_S), shift)
                got, q, w = compress_pages(kv[at], gate[at], open, alone, **shape, **args)
                first = past // stride
                assert w[q >= 0].tolist() == list(range(first, n // stride))
                where, none = f"{n} tokens, past {past}", first == n // stride
                count += compare_bits(got[q >= 0], own[first:], where, empty=none)
    assert count > 2 * sum(n // stride for n in ROWS) * dim
    print(f"{count} values, none unequal")


def pages_of(data: Tensor, gap: int) -> Pages:
    """One sequence's records in pages of 64 in any order, `gap` bytes apart."""
    N, size = data.shape
    row, pages = size + gap, -(-N // 64)
    table = torch.randperm(pages).int()[None].cuda()
    memory = torch.full((pages, 64, row), 0xFF, dtype=torch.uint8).cuda()
    n = torch.arange(N).cuda()
    memory[table[0, n // 64].long(), n % 64, :size] = data
    return Pages(memory, table, 64, 64 * row, row)


@pytest.mark.parametrize("entries", [1000, 65536])
def test_choice(entries: int) -> None:
    """Scores against float64 of what is kept; picks by the rule; then the bits of tokens in packs of every size and
    place, of pages of any alignment, however a token's entries are shared out."""
    T, J, I, k = 1200 if entries == 1000 else 40, 64, 128, 512
    record = VectorFP8()
    q = round_trip(torch.randn(T, J, I).cuda(), record, torch.bfloat16)
    weights, rows = torch.randn(T, J).cuda() / 8, torch.randn(entries, I).cuda()
    data = encode(rows, record)
    who = replace(step([1], [0]), sequence_T=torch.zeros(T, dtype=torch.int32).cuda())
    seen = torch.randint(0, entries + 1, (T,)).cuda()
    seen[:4] = torch.tensor([entries, 0, 1, 512]).cuda()
    N = -(-entries // 64) * 64
    whole = torch.full((T, N), math.nan).cuda()
    kernels.scores(q, weights, pages_of(data, 0), who, seen, 0, whole)
    known = record.decode(data, I).double()
    for t in range(0, T, 39):
        want = (q[t].double() @ known.T).clamp_min(0).T @ weights[t].double()
        got = whole[t, : seen[t]].double()
        torch.testing.assert_close(got, want[: seen[t]], rtol=1e-4, atol=1e-3)
    picks = select_pages(q, weights, pages_of(data, 4), who, seen, k, entries)
    count = compare_bits(picks, top(whole, seen, k), "the rule")
    for gap in (0, 1, 12):  # records on 4 bytes, on 1, on 16
        keys = pages_of(data, gap)
        for n in (n for n in ROWS if n <= T):
            for p in (p for p in PLACES if p + n <= T):
                part = slice(p, p + n)
                own = replace(who, sequence_T=who.sequence_T[part])
                args = q[part], weights[part], keys, own, seen[part]
                for splits in (None, 1, 7):
                    got = torch.full((n, N), math.nan).cuda()
                    kernels.scores(*args, 0, got, splits)
                    known_N = ~whole[part].isnan()
                    none = not bool(known_N.any())
                    want = whole[part][known_N]
                    count += compare_bits(got[known_N], want, f"{n} from {p}", empty=none)
                some = select_pages(*args, k, 2 * entries)
                count += compare_bits(some, picks[part], f"picks of {n} from {p}")
    assert count > 3 * T * k
    print(f"{count} values, none unequal")


def test_choice_in_a_graph() -> None:
    """Nothing waits for the device: a captured choice and captured entries follow what they are replayed on."""
    J, I, k, N, T = 64, 128, 512, 4096, 8
    record, rows = VectorFP8(), torch.randn(N, 128).cuda()
    keys = pages_of(encode(rows, record), 0)
    q, weights = torch.randn(T, J, I).cuda().bfloat16(), torch.randn(T, J).cuda()
    q = round_trip(q, record)
    who = replace(step([1], [0]), sequence_T=torch.zeros(T, dtype=torch.int32).cuda())
    seen = torch.full((T,), 700).cuda()
    select_pages(q, weights, keys, who, seen, k, N)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        picks = select_pages(q, weights, keys, who, seen, k, N)
    count = 0
    for n in (0, 3, 600, 4096):
        seen.fill_(n)
        graph.replay()
        want = select_pages(q, weights, keys, who, seen, k, N)
        count += compare_bits(picks, want, f"{n} entries")
    assert count == 4 * T * k
