"""LocalContext on packs: each sequence as if alone, entries once their window closed, and what it refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from unified_models.context import Entries, LatentFP8, Pool, Rope, Rows, Table, VectorFP8, Weight
from unified_models.context.interface import Experts
from unified_models.context.local import LocalContext
from unified_models.context.memory import Readable
from unified_models.context.step import Step
from unified_models.ops.attend_latent.reference import attend_latent as attend_reference
from unified_models.ops.compress.reference import pool as pool_reference
from unified_models.ops.rms_norm.reference import rms_norm
from unified_models.ops.rope import frequencies
from unified_models.ops.rope.reference import rope as rope_reference

DIM, ROPE, EPS = 12, Rope(8, 10000.0), 1e-6
LENGTHS = list(range(10))


def weight(*shape: int, label: str = "weight", **options: Any) -> Weight:
    made = Weight(*(part for size in shape for part in (None, size)), **options)
    made.label = label
    with torch.no_grad():
        made.master.copy_(torch.randn(shape))
    made.commit()
    return made


class Compressor:
    """The weights and the slot of one compressor, and its call."""

    def __init__(self, stride: int, overlap: bool, dim: int = DIM, record: Any = None) -> None:
        options = {} if record is None else {"record": record}
        self.slot = Entries(dim, stride=stride, overlap=overlap, **options)
        self.bias = weight(stride, self.slot.channels, format="float32")
        self.norm = weight(dim)

    def __call__(self, ctx: LocalContext, kv: Tensor, gate: Tensor) -> Pool:
        return ctx.compress(kv, gate, self.slot, bias=self.bias, norm=self.norm, eps=EPS, rope=ROPE)

    def entry(self, kv: Tensor, gate: Tensor, w: int) -> Tensor:
        """Entry w of one sequence in float64, before norm and rope, token by token."""
        stride, dim = self.slot.stride, self.slot.dim
        gates = gate + self.bias().value.double()[torch.arange(len(gate)) % stride]
        halves = [(w - 1, slice(0, dim)), (w, slice(dim, 2 * dim))]
        windows = halves if self.slot.overlap else [(w, slice(0, dim))]
        seen = [(v, c) for v, c in windows if v >= 0]
        picked = [
            torch.cat([t[v * stride : (v + 1) * stride, c] for v, c in seen]) for t in (kv, gates)
        ]
        return pool_reference(*picked)


@pytest.mark.parametrize("overlap", [False, True], ids=["apart", "overlapping"])
def test_compress_against_brute_force(overlap: bool) -> None:
    """Sequences of 0..9 tokens in one pack, windows of 4."""
    make = Compressor(4, overlap)
    step = Step.of(LENGTHS)
    kv, gate = torch.randn(2, step.num_tokens, make.slot.channels)
    pool = make(LocalContext(step), kv, gate)
    assert len(pool.readable.rows_RD) == sum(n // 4 for n in LENGTHS) > 0
    assert pool.count_T.tolist() == [(p + 1) // 4 for n in LENGTHS for p in range(n)]
    checked = 0
    for s, n in enumerate(LENGTHS):
        part = slice(int(step.starts_S[s]), int(step.starts_S[s + 1]))
        for w in range(n // 4):
            raw = make.entry(kv[part].double(), gate[part].double(), w)
            normed = rms_norm(raw, make.norm().value.double(), EPS)
            turned = rope_reference(
                normed[None], torch.tensor([4 * w]), frequencies(ROPE, torch.device("cpu"))
            )
            got = pool.readable.rows_RD[pool.readable.base_S[s] + w].double()
            assert torch.allclose(got, turned[0], atol=1e-5)  # float32 sums of 8, norm over 12
            checked += 1
    assert checked == len(pool.readable.rows_RD)


@pytest.mark.parametrize("stride", [4, 8])
def test_packed_is_alone(stride: int) -> None:
    """Compress, select and attend on a pack: every sequence has the bits that it has alone."""
    make = Compressor(stride, stride == 4, 72, LatentFP8(8))
    index = Compressor(stride, stride == 4, 16, VectorFP8())
    window = Rows(72, keep=16, record=LatentFP8(8))
    lengths = [1, 0, 3, 70, 16, 65]
    T, C = sum(lengths), make.slot.channels
    kv, gate = torch.randn(2, T, C)
    kv_i, gate_i = torch.randn(2, T, index.slot.channels)
    q, rows, q_i, w_i = (torch.randn(T, *s) for s in ((2, 72), (72,), (4, 16), (4,)))
    rows, q = rows.bfloat16(), q.bfloat16()

    def run(step: Step, part: slice) -> Tensor:
        ctx = LocalContext(step)
        pool = make(ctx, kv[part], gate[part])
        keys = index(ctx, kv_i[part], gate_i[part])
        picks = ctx.select(q_i[part], w_i[part], keys, 3, nn.Module())
        return ctx.attend_latent(q[part], rows[part], window, scale=0.1, pool=pool, picks_TK=picks)

    whole, compared = run(Step.of(lengths), slice(0, T)), 0
    for s, n in enumerate(lengths):
        start = sum(lengths[:s])
        alone = run(Step.of([n]), slice(start, start + n))
        assert torch.equal(alone.view(torch.int16), whole[start : start + n].view(torch.int16))
        compared += alone.numel()
    assert compared == whole.numel() > 0


@pytest.mark.parametrize("stride", [4, 128])
def test_an_entry_is_seen_once_its_window_closed(stride: int) -> None:
    """Change entry w alone: the token that closes its window changes, and those after; the token before does not."""
    make, window = Compressor(stride, False), Rows(DIM, keep=2)
    T = 3 * stride + 2
    ctx = LocalContext(Step.of([T]))
    kv, gate = torch.randn(2, T, DIM)
    q, rows = torch.randn(T, 2, DIM), torch.randn(T, DIM)
    pool = make(ctx, kv, gate)
    assert len(pool.readable.rows_RD) == 3
    want = ctx.attend_latent(q, rows, window, scale=0.3, pool=pool)
    for w in range(3):
        changed = pool.readable.rows_RD.clone()
        changed[w] += 1
        other = Pool(pool.slot, Readable(changed, pool.readable.base_S), pool.count_T)
        got = ctx.attend_latent(q, rows, window, scale=0.3, pool=other)
        seen = (got != want).flatten(1).any(1).nonzero()[:, 0].tolist()
        assert seen == list(range(w * stride + stride - 1, T))


def test_attention_over_pool_and_window_and_gradient() -> None:
    """One softmax over entries and window, sinks in the denominator, against float64 token by token, with every
    gradient. float32 sums of at most 24 terms: 1e-5."""
    make, window = Compressor(4, False), Rows(DIM, keep=5)
    T = 19
    leaves = [
        torch.randn(s).requires_grad_() for s in ((T, DIM), (T, DIM), (T, 2, DIM), (T, DIM), (2,))
    ]
    kv, gate, q, rows, sinks = leaves
    ctx = LocalContext(Step.of([T]))
    pool = make(ctx, kv, gate)
    got = ctx.attend_latent(q, rows, window, scale=0.3, pool=pool, sinks_H=sinks)
    doubles = [x.detach().double().requires_grad_() for x in leaves]
    kv, gate, q, rows, sinks = doubles
    table = frequencies(ROPE, torch.device("cpu"))
    raw = torch.stack([make.entry(kv, gate, w) for w in range(T // 4)])
    normed = rms_norm(raw, make.norm().value.double(), EPS)
    entries = rope_reference(normed, 4 * torch.arange(T // 4), table)
    outs = []
    for t in range(T):
        keys = torch.cat((entries[: (t + 1) // 4], rows[max(0, t - 4) : t + 1]))
        outs.append(attend_reference(q[t], keys, scale=0.3, sinks_H=sinks))
    want, cotangent = torch.stack(outs), torch.randn(T, 2, DIM)
    assert torch.allclose(got.double(), want, atol=1e-5)
    grads = torch.autograd.grad(got, leaves, cotangent)
    for mine, truth in zip(
        grads, torch.autograd.grad(want, doubles, cotangent.double()), strict=True
    ):
        assert torch.allclose(mine.double(), truth, atol=1e-5 * float(truth.abs().max()) + 1e-7)
        assert bool((truth != 0).any())


def test_a_pack_has_no_past() -> None:
    ctx = LocalContext(Step.of([1], [3]))
    with pytest.raises(AssertionError, match="a pack without memory starts every sequence at"):
        ctx.attend_latent(torch.zeros(1, 1, 4), torch.zeros(1, 4), Rows(4), scale=1.0)


@pytest.mark.parametrize("token", [-1, 11, 1 << 40])
def test_token_ids_out_of_range(token: int) -> None:
    table = weight(11, 4, label="embed")
    hashes = Table(None, 11, None, 2)
    hashes.label = "tid2eid"
    ctx, ids_T = LocalContext(Step.of([3])), torch.tensor([0, 10, token])
    for call, name in ((ctx.embed, "embed"), (ctx.lookup, "tid2eid")):
        told = rf"{name}: token id {token} in row 2 is not in \[0, 11\)"
        with pytest.raises(ValueError, match=told):
            call(ids_T, table if name == "embed" else hashes)
    assert ctx.embed(ids_T[:2], table).shape == (2, 4)
    assert ctx.lookup(ids_T[:2], hashes).dtype == torch.int64


@pytest.mark.parametrize("size", [1, 16, 32, 64, 1024])
def test_first_row_of_experts_B09(size: int) -> None:
    """The same token first among M, and alone on its experts: its row keeps its bits."""
    experts = Experts(8, 32, 16, limit=10.0, format="fp8_ue8m0")
    for w in (experts.gate, experts.up, experts.down):
        with torch.no_grad():
            w.master.copy_(torch.randn(w.shape))
        w.commit()
    x = torch.randn(1024, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    gates = torch.rand(1024, 2)
    ids = torch.randint(0, 6, (1024, 2))
    ids[0] = torch.tensor([7, 3])
    ids[:, 0] = torch.where(torch.arange(1024) > 0, ids[:, 0], 7)  # expert 7: token 0 only
    alone = LocalContext(Step.of([1])).moe(x[:1], ids[:1], gates[:1], experts)
    together = LocalContext(Step.of([size])).moe(x[:size], ids[:size], gates[:size], experts)
    assert torch.equal(together[:1].view(torch.int16), alone.view(torch.int16))
    assert bool(alone.isfinite().all() and (alone != 0).any())


def test_notes_reach_the_onlooker() -> None:
    """Choices and the number of rows of each expert; a note costs nothing when nobody looks."""
    seen: dict[str, Any] = {}
    ctx = LocalContext(
        Step.of([3]), onlooker=lambda site, name, value: seen.__setitem__(name, value)
    )
    scores = torch.randn(3, 8)
    ids = ctx.choose(scores, 2, nn.Module())
    assert torch.equal(seen["choose"][0], scores)
    assert torch.equal(seen["choose"][1], ids)

    def expensive() -> int:
        raise AssertionError("nobody looks")

    LocalContext(Step.of([1])).note(nn.Module(), "x", expensive)
