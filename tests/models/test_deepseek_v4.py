"""DeepSeek-V4 forward: against plain float64 maths, and what a token may and may not see."""

from typing import Any

import pytest
import torch
from torch import Tensor

import unified_models as um
from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.models.deepseek_v4 import MoE
from unified_models.ops.operator import observe

WINDOW_ONLY = {"num_hidden_layers": 1, "compress_ratios": (0,), "num_hash_layers": 0}


def hidden(model: Any, sequence: list[int]) -> Tensor:
    with torch.no_grad():
        ctx = LocalContext(Step.of([len(sequence)]))
        out: Tensor = model(torch.tensor(sequence), ctx)
    return out


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("length", [2, 3, 4, 5, 15, 16, 17, 63, 64, 65, 210])
def test_logprobs_against_float64_C17(tiny, plain, tokens, length: int) -> None:
    """Windows of 16, entries of 4 and 8 tokens, picks, both kinds of routing, both rope bases. Tolerance: four blocks
    of float32 arithmetic; measured 2e-5 at most (2026-11)."""
    model, ids = tiny("float32"), tokens(length)
    with torch.no_grad():
        got, want = um.logprobs(model, [ids])[0], plain(model).logprobs(ids)
    assert len(got) == length - 1
    assert (got.double() - want).abs().max() < 1e-4


def test_temperature_against_float64_A01(tiny, plain, tokens) -> None:
    """T = 0.7 on both sides means log_softmax(logits / 0.7) over the whole vocabulary."""
    model, ids = tiny("float32"), tokens(20)
    with torch.no_grad():
        got, want = um.logprobs(model, [ids], 0.7)[0], plain(model).logprobs(ids, 0.7)
        other = um.logprobs(model, [ids], 1.0)[0]
    assert (got.double() - want).abs().max() < 1e-4
    assert (got - other).abs().max() > 1e-2


def test_one_output_group_against_float64(tiny, plain, tokens) -> None:
    """o_groups = 1: the output projection is one matrix."""
    model, ids = tiny("float32", o_groups=1), tokens(40)
    with torch.no_grad():
        got, want = um.logprobs(model, [ids])[0].double(), plain(model).logprobs(ids)
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["top_p", "top_k", "min_p"])
def test_other_distributions_are_refused_A02(name: str) -> None:
    value = {"top_p": 0.9, "top_k": 20, "min_p": 0.1}[name]
    with pytest.raises(ValueError, match=rf"{name} = {value} is refused"):
        um.Sampling(**{name: value})


@pytest.mark.parametrize("length", [1, 2, 3, 4, 127, 128])
def test_short_sequences_C20(tiny, tokens, length: int) -> None:
    """Before the first entry, and when the 128-entry closes; as a prefix of a longer sequence, bit for bit."""
    model = tiny(compress_ratios=(0, 4, 128, 4))
    long = tokens(150)
    short, whole = hidden(model, long[:length]), hidden(model, long)
    assert bool(short.isfinite().all())
    assert torch.equal(bits(short), bits(whole[:length]))
    lps = um.logprobs(model, [long[:length]])[0]
    assert lps.shape == (length - 1,)


@pytest.mark.parametrize("window", [127, 128, 129])
def test_window_only_layer_forgets_C16(tiny, tokens, window: int) -> None:
    """Position 199 of a ratio-0 layer: token 0 and the last outside the window change no bit; the first inside does."""
    model, ids = tiny(sliding_window=window, **WINDOW_ONLY), tokens(200)
    want = hidden(model, ids)[199]
    for changed, seen in ((0, False), (199 - window, False), (200 - window, True), (199, True)):
        other = list(ids)
        other[changed] = (other[changed] + 1) % 96
        got = hidden(model, other)[199]
        assert bool((bits(got) != bits(want)).any()) == seen, f"token {changed}"


@pytest.mark.parametrize("ratio", [4, 8])
def test_nobody_sees_the_future(tiny, tokens, ratio: int) -> None:
    """Change token t: every position before it keeps its bits, in each layer kind, at the edges of windows."""
    model, ids = tiny(compress_ratios=(ratio,) * 4), tokens(70)
    want = hidden(model, ids)
    for changed in (1, 3, 4, 7, 8, 15, 16, 40, 63, 64, 69):
        other = list(ids)
        other[changed] = (other[changed] + 1) % 96
        got = hidden(model, other)
        assert torch.equal(bits(got[:changed]), bits(want[:changed]))
        assert bool((bits(got[changed]) != bits(want[changed])).any())


def test_rope_by_layer_kind_C17(tiny) -> None:
    """The base comes from the configuration, one for window-only layers and one for all others, entries' too."""
    for base in (160000.0, 40000.0):
        model = tiny(compress_rope_theta=base)
        for block, ratio in zip(model.blocks, (0, 4, 8, 4), strict=True):
            attention = block.attention
            ropes = [attention.rope]
            ropes += [attention.compressor.rope] if attention.compressor else []
            if attention.indexer:
                ropes += [attention.indexer.rope, attention.indexer.compressor.rope]
            assert len(ropes) == {0: 1, 8: 2, 4: 4}[ratio]
            assert {r.theta for r in ropes} == {base if ratio else 10000.0}
            assert {r.factor for r in ropes} == {16.0 if ratio else None}


def moe_of(tiny: Any, **overrides: Any) -> MoE:
    """One expert, chosen always, its weight 1: the routed and the shared answer alone are of the same kind."""
    model = tiny(
        "float32",
        n_routed_experts=1,
        num_experts_per_tok=1,
        routed_scaling_factor=1.0,
        num_hash_layers=0,
        **overrides,
    )
    moe: MoE = model.blocks[0].ffn
    return moe


@pytest.mark.parametrize("kind", ["routed", "shared"])
def test_clamps_of_experts_C23(tiny, kind: str) -> None:
    """Gates -20, -12, 2, 20, ups of +-20, limit 10: gate above only, up both ways, in both kinds of experts."""
    moe = moe_of(tiny)
    gates, ups = torch.tensor([-20.0, -12.0, 2.0, 20.0] * 2), torch.tensor([-20.0] * 4 + [20.0] * 4)
    gate, up, down = torch.zeros(32, 64), torch.zeros(32, 64), torch.zeros(64, 32)
    gate[:8, 0], up[:8, 0] = gates, ups
    down[:8, :8] = torch.eye(8)
    routed, shared = (gate, up, down), (gate, up, torch.zeros_like(down))
    if kind == "shared":
        routed, shared = shared, routed
    for weight, value in zip(
        (moe.experts.gate, moe.experts.up, moe.experts.down), routed, strict=True
    ):
        weight.assign(value[None])
    for weight, value in zip((moe.w1, moe.w3, moe.w2), shared, strict=True):
        weight.assign(value)
    x = torch.zeros(1, 64)
    x[0, 0] = 1.0
    got = moe(x, torch.tensor([0]), LocalContext(Step.of([1])))
    cut = gates.double().clamp(max=10.0)
    want = cut / (1 + torch.exp(-cut)) * ups.double().clamp(-10, 10)
    assert torch.allclose(got[0, :8].double(), want, rtol=1e-6)
    assert want.abs().max() == pytest.approx(99.9954602)


def test_zero_blocks_stay_zero_C15(tiny, tokens) -> None:
    """A projection of zeros, an expert of zeros, a half of zeros: finite logprobs and gradients, no NaN scale."""
    model = tiny()
    block = model.blocks[3]
    block.attention.wkv.assign(torch.zeros(block.attention.wkv.shape))
    block.ffn.experts.up.assign(torch.zeros(32, 64), index=2)
    half = block.ffn.w1.master.detach().clone()
    half[:, 32:] = 0
    block.ffn.w1.assign(half)
    lps = um.logprobs(model, [tokens(40)])[0]
    lps.sum().backward()
    assert bool(lps.isfinite().all())
    grads = [w.master.grad for _, w in model.weights() if not w.frozen]
    assert all(bool(g.isfinite().all()) for g in grads)
    assert bool((block.attention.wkv().dequantized() == 0).all())
    assert bool((block.ffn.w1().dequantized()[:, 32:] == 0).all())


def chosen(model: Any, ids: list[int]) -> dict[str, Tensor]:
    """The experts of every token, by layer."""
    seen: dict[str, Tensor] = {}
    sites = {module: path for path, module in model.named_modules()}

    def look(site: Any, name: str, value: Any) -> None:
        if name == "choose":
            seen[sites[site]] = value[1]

    with torch.no_grad():
        model(torch.tensor(ids), LocalContext(Step.of([len(ids)]), onlooker=look))
    return seen


@pytest.mark.parametrize("cast", ["bfloat16", "double"])
def test_experts_after_a_cast_A14(tiny, tokens, cast: str) -> None:
    """Router biases near 7, which bf16 would round to few values: the same experts and bits after model.bfloat16()."""
    model, ids = tiny(), tokens(60)
    for block in model.blocks[2:]:
        block.ffn.bias.assign(torch.linspace(6.82, 7.06, 8)[torch.randperm(8)])
    want, before = chosen(model, ids), hidden(model, ids)
    getattr(model, cast)()
    got = chosen(model, ids)
    assert set(got) == {"blocks.2.ffn", "blocks.3.ffn"}
    assert all(torch.equal(got[site], want[site]) for site in want)
    assert torch.equal(bits(hidden(model, ids)), bits(before))


@pytest.mark.parametrize(
    ("numerics", "dtype"), [("deployed", torch.bfloat16), ("float32", torch.float32)]
)
def test_dtypes_along_the_forward_D02(tiny, tokens, numerics: str, dtype: torch.dtype) -> None:
    """Streams, rows and answers are bfloat16 (or float32, as numerics ask); maps, scores and logits are float32."""
    seen: dict[str, set[torch.dtype]] = {}

    def look(name: str, out: Any) -> Any:
        for t in out if isinstance(out, tuple) else (out,):
            if isinstance(t, Tensor) and t.is_floating_point():
                seen.setdefault(name, set()).add(t.dtype)
        return out

    model, ids = tiny(numerics), tokens(20)
    with torch.no_grad(), observe(look):
        ctx = LocalContext(Step.of([20]))
        logits = model.logits(model(torch.tensor(ids), ctx), ctx)
    assert logits.dtype == torch.float32
    for name in ("embed", "attend_latent", "moe", "hyper_collapse", "hyper_expand", "swiglu"):
        assert seen[name] == {dtype}, name
    for name in ("hyper_normalize", "hyper_maps", "sqrt_softplus"):
        assert seen[name] == {torch.float32}, name


def test_equal_streams_at_the_start(tiny, tokens) -> None:
    """The embedding is the start of all four streams: a copy instead of a view changes no bit."""
    model, ids = tiny(), tokens(20)
    want = hidden(model, ids)
    first = model.blocks[0]
    forward = first.forward
    first.forward = lambda streams, *args: forward(streams.clone().contiguous(), *args)
    assert torch.equal(bits(hidden(model, ids)), bits(want))
