"""In Triton's interpreter, in a process of its own: records, entries and the indexer's choice over pages, against the
operators of the CPU and against themselves. Prints how many values were compared. tests/gpu runs it on a device."""

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.conftest import poisoning
from tests.ops.conftest import compare_bits
from unified_models.formats.records import BFLOAT16_RECORD, LatentFP8, VectorFP8
from unified_models.ops.compress import closing_windows, compress, compress_pages
from unified_models.ops.pages import Pages, Sequences, write
from unified_models.ops.records_triton import encode, round_trip, write_records
from unified_models.ops.rope import Rope
from unified_models.ops.select import select, select_pages
from unified_models.ops.select import triton as kernels
from unified_models.ops.select.reference import top as reference_top

LENGTHS = (1, 5, 33, 70, 0, 12)
STEPS = ((1, 3, 30, 20, 0, 4), (0, 1, 1, 44, 0, 4), (0, 1, 2, 6, 0, 4))
"""New tokens of each sequence in each step; the fifth sequence is padding."""
ROPE = Rope(8, 10000.0)
PER_PAGE = 16


@dataclass(frozen=True)
class Part:
    """A step: its tokens' numbers in the whole, and whose they are, some of padding behind them."""

    tokens: Tensor
    order: list[int]
    who: Sequences


def device() -> str:
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"


def sequences(lengths: list[int], past: list[int], padding: int = 0) -> Sequences:
    own = [s for s, n in enumerate(lengths) for _ in range(n)]
    places = [p + i for n, p in zip(lengths, past, strict=True) for i in range(n)]
    starts = [sum(lengths[:s]) for s in range(len(lengths) + 1)]
    total = [n + p for n, p in zip(lengths, past, strict=True)]
    of = (own + [-1] * padding, places + [0] * padding, starts, past, total)
    return Sequences(*(torch.tensor(each, dtype=torch.int32) for each in of))


def steps(padding: int = 3) -> list[Part]:
    """Sequences without new tokens stand behind the others, as an engine would have them."""
    parts, done = [], [0] * len(LENGTHS)
    for new in STEPS:
        order = sorted(range(len(new)), key=lambda s, new=new: not new[s])
        first = [sum(LENGTHS[:s]) + done[s] for s in range(len(new))]
        tokens = [first[s] + i for s in order for i in range(new[s])]
        past = [done[s] if new[s] else 0 for s in order]
        who = sequences([new[s] for s in order], past, padding)
        parts.append(Part(torch.tensor(tokens), order, who))
        done = [n + m for n, m in zip(done, new, strict=True)]
    assert done == list(LENGTHS)
    return parts


def padded(rows: Tensor, part: Part) -> Tensor:
    """The step's rows, and NaN where nobody's tokens are."""
    rest = len(part.who.sequence_T) - len(part.tokens)
    return torch.cat((rows[part.tokens], rows.new_full((rest, *rows.shape[1:]), math.nan)))


def hostile(rows: int, D: int, dtype: torch.dtype) -> Tensor:
    """Rows of all magnitudes, zeros, halves between codes and the largest, within wider ones of NaN."""
    x = torch.randn(rows, D) * torch.logspace(-14, 14, rows)[:, None]
    x[0], x[1, : D // 2] = 0, x[1, : D // 2] * 1e-4
    x[2] = torch.linspace(-448, 448, D)
    x[3] = torch.cat((torch.tensor([448.0]), torch.arange(D - 1) * 2.0**-10))
    x[4], x[5] = 3e38, torch.arange(D) * 2.0**-126  # subnormal bfloat16 the interpreter cannot
    memory = torch.full((rows, D + 16), math.nan, dtype=dtype)
    memory[:, :D] = x
    return memory[:, :D]


def check_records() -> int:
    count = 0
    for record, D in (
        (VectorFP8(), 128),
        (VectorFP8(), 20),
        (LatentFP8(64), 512),
        (LatentFP8(6), 70),
    ):
        for dtype in (torch.float32, torch.bfloat16):
            rows = hostile(21, D, dtype)
            data = record.encode(rows)
            count += compare_bits(encode(rows, record), data, "bytes")
            count += compare_bits(encode(rows[7:8], record), data[7:8], "one row")
            want = record.decode(data, D)
            count += compare_bits(round_trip(rows, record), want, "read back")
            other = torch.float32 if want.dtype == torch.bfloat16 else torch.bfloat16
            heads = round_trip(rows[:6].unflatten(0, (2, 3)), record, other)
            count += compare_bits(heads, want[:6].unflatten(0, (2, 3)).to(other), str(other))
            for row, start in ((record.size(D) + 4, 4), (record.size(D) + 3, 1)):
                count += check_written(rows, record, row, start, data)
    return count


def check_written(
    rows: Tensor, record: LatentFP8 | VectorFP8, row: int, start: int, data: Tensor
) -> int:
    """21 rows of three sequences in pages of four, one of them nobody's; nothing else is touched. Then in rings."""
    sequence = torch.tensor([0] * 9 + [2] * 6 + [-1] + [1] * 5).int()
    number = torch.tensor([*range(2, 11), *range(6), 7, *range(5)]).int()
    total = torch.tensor([11, 5, 6]).int()
    table = torch.randperm(12).int().view(3, 4)
    page, size = 4 * row + 8, data.shape[1]
    for ring in (4, 2):
        memory = torch.full((12, page), 0xAB, dtype=torch.uint8)
        want = memory.clone()
        line = want.view(-1)
        pages = Pages(memory, table, 4, page, row, start, ring)
        write_records(pages, rows, record, sequence, number, total)
        for u, (s, p) in enumerate(zip(sequence.tolist(), number.tolist(), strict=True)):
            if s >= 0 and p >= min(int(total[s]), (p // 4 + 1) * 4) - ring:
                at = int(table[s, p // 4]) * page + p % 4 % ring * row + start
                line[at : at + size] = data[u]
        compare_bits(memory, want, "pages")
    return 2 * memory.numel()


def check_plain_records() -> int:
    """A plain record is its dtype's pages."""
    rows = torch.randn(5, 24).bfloat16().float()  # the interpreter cuts what it casts
    table = torch.tensor([[3, 1], [0, 2]]).int()
    memory = torch.full((4, 2, 24), torch.nan, dtype=torch.bfloat16)
    sequence, number = torch.tensor([0, 0, 0, 1, -1]).int(), torch.tensor([0, 1, 2, 3, 0]).int()
    pages = Pages(memory, table, 2, 48, 24)
    write_records(pages, rows, BFLOAT16_RECORD, sequence, number, torch.tensor([3, 4]).int())
    got = torch.stack((memory[3, 0], memory[3, 1], memory[1, 0], memory[2, 1]))
    assert int(memory.isnan().sum()) == 4 * 24
    return compare_bits(got, rows[:4].bfloat16(), "plain")


def check_closing() -> int:
    """Every window once, in order, and nothing after the last."""
    count = 0
    for part in steps():
        for stride in (1, 4, 8, 128):
            past, total = part.who.past_S.tolist(), part.who.total_S.tolist()
            want = [
                (s, w)
                for s in range(len(past))
                for w in range(past[s] // stride, total[s] // stride)
            ]
            tokens = len(part.who.sequence_T)
            sequence, number = closing_windows(part.who, tokens, stride)
            got = list(zip(sequence.tolist(), number.tolist(), strict=True))
            assert len(got) == min(tokens, tokens // stride + len(past))
            assert got == want + [(-1, 0)] * (len(got) - len(want))
            count += len(got)
    many = sequences([1, 0, 4, 2] * 90, [3, 9, 1, 5] * 90)  # more than a block of sequences
    sequence, number = closing_windows(many, 630, 4)
    want = [(4 * s + i, w) for s in range(90) for i, w in ((0, 0), (2, 0))]
    assert list(zip(sequence.tolist(), number.tolist(), strict=True))[:180] == want
    assert bool((sequence[180:] == -1).all())
    return count + len(sequence)


def check_entries(stride: int, overlap: bool, dim: int, halves: bool) -> int:
    """The whole sequences on the CPU, in one step by kernels, and in three steps, the open rows in rings of pages."""
    T, span = sum(LENGTHS), stride * (2 if overlap else 1)
    C = dim * span // stride
    wide = torch.randn(T, 2 * C + 8)
    kv, gate, bias = wide[:, :C], wide[:, C : 2 * C], torch.randn(stride, C)
    norm = 1 + 0.2 * torch.randn(dim)
    rope = replace(ROPE, halves=halves)
    args = {"dim": dim, "eps": 1e-6, "rope_": rope}
    who = sequences(list(LENGTHS), [0] * len(LENGTHS))
    nothing = Pages.flat(torch.full((1, 2 * C), math.nan), who.past_S)
    shape = {"stride": stride, "overlap": overlap}
    whole, sequence, number = compress_pages(kv, gate, nothing, who, **shape, **args, bias=bias, norm=norm)  # fmt: skip
    there = sequence >= 0
    index = (number.long()[:, None] + 1) * stride + torch.arange(-span, 0)
    index = torch.where(index < 0, -1, index + who.starts_S1[sequence.long()][:, None])[there]
    biased = gate + bias[who.position_T.long() % stride]
    want = compress(torch.cat((kv, biased), 1), index, norm=norm,
                    positions_U=number[there].long() * stride, **args)  # fmt: skip
    torch.testing.assert_close(whole[there], want, rtol=2e-5, atol=2e-5)
    assert bool((whole[~there] == 0).all())

    ring = min(span, PER_PAGE) if PER_PAGE % span == 0 else PER_PAGE
    table = torch.randperm(8 * 6).int().view(6, 8)
    memory = torch.full((48, ring, 2 * C + 4), math.nan)
    count, seen = 0, 0
    for part in steps():
        new_kv, new_gate = padded(kv, part), padded(gate, part)
        moved = table[part.order].contiguous()
        open = Pages(memory, moved, PER_PAGE, ring * (2 * C + 4), 2 * C + 4, ring=ring)
        got, s_U, w_U = compress_pages(new_kv, new_gate, open, part.who, **shape, **args,
                                       bias=bias, norm=norm)  # fmt: skip
        rows = new_gate + bias[part.who.position_T.long() % stride]
        write(part.who, (open, replace(open, start=C)), (new_kv, rows))
        for u, (s, w) in enumerate(zip(s_U.tolist(), w_U.tolist(), strict=True)):
            if s >= 0:
                same = (sequence == part.order[s]) & (number == w)
                count += compare_bits(got[u], whole[same][0], f"entry {w} of {part.order[s]}")
                seen += 1
    assert seen == int(there.sum()) > 0
    return count + entry_gradients(kv, gate, bias, norm, nothing, who, index, shape, args)


def entry_gradients(
    kv: Tensor,
    gate: Tensor,
    bias: Tensor,
    norm: Tensor,
    nothing: Pages,
    who: Sequences,
    index: Tensor,
    shape: dict,
    args: dict,
) -> int:
    grads = []
    for kernel in (True, False):
        leaves = [x.detach().clone().requires_grad_() for x in (kv, gate, bias, norm)]
        entries, sequence, number = compress_pages(
            leaves[0], leaves[1], nothing, who, **shape, **args, bias=leaves[2], norm=leaves[3]
        )
        there = sequence >= 0
        if not kernel:
            biased = leaves[1] + leaves[2][who.position_T.long() % shape["stride"]]
            positions = number[there].long() * shape["stride"]
            rows = torch.cat((leaves[0], biased), 1)
            entries = compress(rows, index, norm=leaves[3], positions_U=positions, **args)
            there = there[there]
        given = torch.linspace(-1, 1, entries[there].numel()).view(entries[there].shape)
        grads.append(torch.autograd.grad(entries[there], leaves, given))
    for got, want in zip(*grads, strict=True):
        assert bool(want.abs().max() > 0)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    return sum(grad.numel() for grad in grads[0])


def key_pages(rows: Tensor, base: list[int], counts: list[int], plain: bool, row: int) -> Pages:
    """Keys of sequence s, rows base .. base + counts - 1, in pages of 16 in any order, next to NaN or 0xFF."""
    record = VectorFP8()
    size = rows.shape[1] if plain else record.size(rows.shape[1])
    dtype = rows.dtype if plain else torch.uint8
    most = -(-max(counts) // PER_PAGE)
    table = torch.randperm(len(counts) * most).int().view(len(counts), most)
    memory = torch.full((table.numel(), PER_PAGE, size + row), math.nan if plain else 0xFF, dtype=dtype)  # fmt: skip
    page = PER_PAGE * (size + row)
    pages = Pages(memory, table, PER_PAGE, page, size + row, row // 2)
    s_U = [s for s, n in enumerate(counts) for _ in range(n)]
    w_U = [w for n in counts for w in range(n)]
    numbers = (torch.tensor(x).int() for x in (s_U, w_U, counts))
    at = torch.tensor([base[s] + w for s, w in zip(s_U, w_U, strict=True)])
    write_records(pages, rows[at], BFLOAT16_RECORD if plain else record, *numbers)
    return pages


def check_choice(J: int, I: int, k: int, dtype: torch.dtype | None) -> int:
    """Scores on whole numbers, so that they are exact and ties are many: the CPU's picks, whatever shares a launch.
    dtype: of plain rows; None: records."""
    counts, T = [70, 1, 200, 0], 12
    base = [0, 70, 71, 0]
    rows = torch.randint(-3, 4, (271, I)).to(dtype or torch.float32)
    q = torch.randint(-2, 3, (T, J, I)).float()
    weights = torch.randint(-2, 4, (T, J)).float()
    sequence = torch.tensor([0, 0, 0, 1, 2, 2, 2, 2, 2, 3, -1, -1]).int()
    seen = torch.tensor([70, 33, 1, 1, 200, 199, 128, 64, 0, 0, 999999, 7])
    weights[10:], q[10:] = math.nan, math.nan
    who = replace(sequences([0], [0]), sequence_T=sequence)
    known = sequence.long().clamp_min(0)
    want = select(q[:10], weights[:10], rows.float(), torch.tensor(base)[known][:10], seen[:10], k)
    count, found = 0, []
    for row, most in ((0, 200), (13, 1000)):
        keys = key_pages(rows, base, counts, dtype is not None, row)
        kernels.WORKSPACE, before = 5 * 4 * most, kernels.WORKSPACE
        picks = select_pages(q, weights, keys, who, seen, k, most)
        kernels.WORKSPACE = before
        count += compare_bits(picks[:10], want, "picks")
        assert bool((picks[10:] == -1).all())
        for splits in (1, 5):
            scores = torch.zeros(10, 256)
            kernels.scores(q, weights, keys, who, seen, 0, scores, splits)
            found.append(scores)
        alone = torch.zeros(1, 256)
        kernels.scores(q, weights, keys, who, seen, 4, alone)
        count += compare_bits(alone, found[0][4:5], "alone")
        for other in found[1:]:
            count += compare_bits(other, found[0], "splits and pages")
    return count


def check_scores() -> int:
    """Random records against float64, and picks of the scores by the rule, counted in blocks of any size."""
    rows, q, weights = torch.randn(200, 128), torch.randn(5, 16, 128), torch.randn(5, 16)
    record, seen = VectorFP8(), torch.tensor([200, 150, 64, 3, 1])
    who = replace(sequences([0], [0]), sequence_T=torch.zeros(5, dtype=torch.int32))
    q = round_trip(q, record, torch.bfloat16)
    keys = key_pages(rows, [0], [200], False, 0)
    scores = torch.full((5, 256), math.nan)
    kernels.scores(q, weights, keys, who, seen, 0, scores)
    known = record.decode(record.encode(rows), 128).double()
    want = (weights.double()[..., None] * (q.double() @ known.T).clamp_min(0)).sum(1)
    for t, n in enumerate(seen.tolist()):
        torch.testing.assert_close(scores[t, :n].double(), want[t, :n], rtol=1e-4, atol=1e-3)
        assert bool(scores[t, n:].isnan().all())
    for k in (1, 16, 100):
        for block in (64, 256):
            picks = torch.empty(5, k, dtype=torch.int64)
            kernels.top(scores, who, seen, 0, picks, block)
            for t, n in enumerate(seen.tolist()):
                assert picks[t].tolist() == reference_top(scores[t, :n].cpu(), k)
    return 6 * 5


def check_rule() -> int:
    """NaN, infinities, zeros of either sign, equals by the hundred, and 65536 entries."""
    nan, inf = math.nan, math.inf
    cases: list[tuple[list[float], int, int]] = [
        ([nan] * 4, 4, 3), ([1.0, nan, 3.0, 2.0], 4, 3), ([1.0, nan, 3.0, 2.0], 4, 4),
        ([-inf] * 4, 4, 3), ([1.0, 3.0, 9.0, 9.0], 2, 3), ([1.0, 3.0, 2.0, 9.0], 3, 3),
        ([9.0] * 4, 0, 3), ([0.0, -0.0, -1.0, -0.0], 4, 2), ([inf, 0.0, inf, -inf], 4, 1),
        ([1.5] * 600, 600, 512), ([0.0, -0.0] * 300, 600, 512), ([-1e-45, 1e-45, 0.0] * 40, 120, 33),
    ]  # fmt: skip
    long = torch.randn(65536)
    cases += [(long.tolist(), 65536, 2048), (long.mul(4).round().tolist(), 65000, 512)]
    who = replace(sequences([0], [0]), sequence_T=torch.zeros(1, dtype=torch.int32))
    for row, count, k in cases:
        picks = torch.empty(1, k, dtype=torch.int64)
        kernels.top(torch.tensor([row]), who, torch.tensor([count]), 0, picks)
        assert picks[0].tolist() == reference_top(torch.tensor(row[:count], device="cpu"), k)
    return len(cases)


def main() -> int:
    torch.manual_seed(0)
    checks: list[Callable[[], int]] = [
        check_records,
        check_plain_records,
        check_closing,
        lambda: check_entries(8, False, 20, True),
        lambda: check_entries(4, True, 136, False),
        lambda: check_entries(32, False, 16, False),
        lambda: check_choice(5, 20, 8, None),
        lambda: check_choice(16, 128, 64, None),
        lambda: check_choice(3, 24, 300, torch.float32),
        lambda: check_choice(16, 32, 16, torch.bfloat16),
        check_scores,
        check_rule,
    ]
    with torch.device(device()):
        torch.empty(
            0
        )  # PyTorch looks its constructors up once, and that must be before one is replaced
    torch.empty, empty = poisoning(torch.empty), torch.empty
    try:
        with torch.device(device()):
            count = sum(check() for check in checks)
    finally:
        torch.empty = empty
    print(f"{count} values agree")
    return count


if __name__ == "__main__":
    main()
