"""Nemotron-H forward: against plain float64 maths, and what a token may and may not see."""

from typing import Any

import pytest
import torch
from torch import Tensor

import unified_models as um
from unified_models.context.local import LocalContext
from unified_models.context.step import Step
from unified_models.ops.operator import observe

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "latent": {"moe_latent_size": 32},
    "chunk128": {"chunk_size": 128},
    "one-group": {"n_groups": 1, "num_key_value_heads": 1},
    "six-groups": {"n_groups": 6, "num_key_value_heads": 4},
    "dense": {"layers_block_type": ["mamba", "mlp", "attention", "mlp"]},
}


def hidden(model: Any, sequence: list[int]) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(torch.tensor(sequence), LocalContext(Step.of([len(sequence)])))
    return out


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.element_size()])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_logprobs_against_float64_D10(hybrid, plain_hybrid, tokens, variant: dict) -> None:
    """Lengths around chunks, tiles and taps; one group, two, and one a head. Tolerance: six blocks of float32
    arithmetic on logits of size 10; measured 1.2e-5 at most (2026-11)."""
    model = hybrid("float32", **variant)
    truth = plain_hybrid(model)
    for length in (2, 3, 4, 5, 15, 16, 17, 18, 33, 100, 130):
        ids = tokens(length)
        with torch.no_grad():
            got, want = um.logprobs(model, [ids])[0], truth.logprobs(ids)
        assert len(got) == length - 1
        assert (got.double() - want).abs().max() < 1e-4, length
    assert want.std() > 1


def test_every_layer_kind_is_there(hybrid, plain_hybrid, tokens) -> None:
    """What the float64 maths says depends on each block: without one, the logprobs move by far more than tolerated."""
    model, ids = hybrid("float32"), tokens(40)
    truth = plain_hybrid(model)
    with torch.no_grad():
        want = truth.logprobs(ids)
        for layer in range(6):
            other = plain_hybrid(model)
            block = other.block
            other.block = lambda at, x, block=block, layer=layer: x if at == layer else block(at, x)
            assert (other.logprobs(ids) - want).abs().max() > 1e-2, layer


@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "mixed"])
@pytest.mark.parametrize("chunk", [16, 128])
def test_a_prefix_has_the_bits_of_the_whole(
    hybrid, hybrid_file, tokens, chunk: int, quantized: bool
) -> None:
    """Lengths around taps, tiles, chunks and blocks of keys."""
    config = hybrid_file.QUANTIZED if quantized else None
    model, long = hybrid(chunk_size=chunk, quantization_config=config), tokens(150)
    whole = hidden(model, long)
    assert bool(whole.isfinite().all())
    for length in (1, 2, 3, 4, 15, 16, 17, 63, 64, 65, 127, 128, 129):
        assert torch.equal(bits(hidden(model, long[:length])), bits(whole[:length])), length


@pytest.mark.parametrize("kind", ["mamba", "attention"])
def test_nobody_sees_the_future(hybrid, tokens, kind: str) -> None:
    """Change token t: every position before it keeps its bits, t itself moves, and so does the last."""
    model, ids = hybrid(layers_block_type=[kind] * 2), tokens(70)
    want = hidden(model, ids)
    for changed in (0, 1, 3, 4, 15, 16, 40, 63, 64, 68):
        other = list(ids)
        other[changed] = (other[changed] + 1) % 96
        got = hidden(model, other)
        assert torch.equal(bits(got[:changed]), bits(want[:changed]))
        assert bool((bits(got[changed]) != bits(want[changed])).any())
        assert bool((bits(got[69]) != bits(want[69])).any()), changed


@pytest.mark.parametrize("kind", ["moe", "mlp"])
def test_only_mixers_in_time_see_the_past(hybrid, tokens, kind: str) -> None:
    model, ids = hybrid(layers_block_type=[kind] * 2), tokens(20)
    want, got = hidden(model, ids), hidden(model, [(t + 1) % 96 for t in ids[:19]] + ids[19:])
    assert torch.equal(bits(got[19]), bits(want[19]))
    assert bool((bits(got[:19]) != bits(want[:19])).any(1).all())


@pytest.mark.parametrize("setting", ["bf16", "mixed", "float32"])
def test_dtypes_along_the_forward_D02(hybrid, hybrid_file, tokens, setting: str) -> None:
    """Each block and mixer takes and gives bfloat16 (float32, where numerics ask), and so does each operator that meets
    the stream; the convolution and the logits stay in float32."""
    config = hybrid_file.QUANTIZED if setting == "mixed" else None
    numerics = "float32" if setting == "float32" else "deployed"
    model = hybrid(numerics, moe_latent_size=32, quantization_config=config)
    dtype = torch.float32 if setting == "float32" else torch.bfloat16
    seen: dict[str, set[torch.dtype]] = {}

    def look(name: str, out: Any) -> Any:
        parts = out if isinstance(out, tuple) else (out,)
        kinds = {t.dtype for t in parts if isinstance(t, Tensor) and t.is_floating_point()}
        seen.setdefault(name, set()).update(kinds)
        return out

    def after(module: Any, args: tuple[Tensor, Any], out: Tensor) -> None:
        layers.append((args[0].dtype, out.dtype))

    layers: list[tuple[torch.dtype, torch.dtype]] = []
    for block in model.blocks:
        block.register_forward_hook(after)
        block.mixer.register_forward_hook(after)
    with torch.no_grad(), observe(look):
        ctx = LocalContext(Step.of([20]))
        out = model(torch.tensor(tokens(20)), ctx)
        logits = model.logits(out, ctx)
    assert layers == [(dtype, dtype)] * 12
    assert (out.dtype, logits.dtype) == (dtype, torch.float32)
    for name in ("embed", "rms_norm", "attend", "scan", "moe", "gated_norm"):
        assert seen[name] == {dtype}, name
    assert seen["conv"] == {torch.float32}


LIMITS = {"open": None, "both": [0.001, 0.1]}


@pytest.mark.parametrize("limits", LIMITS.values(), ids=LIMITS)
def test_time_steps_are_clamped_after_the_softplus_D12(
    hybrid, plain_hybrid, tokens, limits: list[float] | None
) -> None:
    """Biases that put the softplus at 0.0005, 0.2 and 50, as in float64, and in the engine as in training."""
    model, ids = hybrid("float32", time_step_limit=limits), tokens(40)
    steps = torch.tensor([0.0005, 0.2, 50.0, 0.0005, 0.2, 50.0], dtype=torch.float64)
    for layer in (0, 3):
        mamba = model.blocks[layer].mixer
        mamba.dt_bias.assign(steps + torch.log(-torch.expm1(-steps)))
        projection = mamba.in_proj.master.detach().clone()
        projection[-6:] *= 0.1  # near the biases
        mamba.in_proj.assign(projection)
    seen: list[Tensor] = []

    truth = plain_hybrid(model)

    class Watching(LocalContext):
        def scan(self, x_THP: Tensor, dt_TH: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            seen.append(dt_TH)
            return super().scan(x_THP, dt_TH, *args, **kwargs)

    with torch.no_grad():
        model(torch.tensor(ids), Watching(Step.of([40])))
        got, want = um.logprobs(model, [ids])[0], truth.logprobs(ids)
    low, high = limits or (0.0, float("inf"))
    assert len(seen) == 2 and all(bool(((low <= dt) & (dt <= high)).all()) for dt in seen)
    assert (limits is None) == any(bool((dt > 40).any() and (dt < 9e-4).any()) for dt in seen)
    assert (got.double() - want).abs().max() < 1e-4
    engine = um.Engine(model, step_tokens=7, poison=True)
    scored = engine.score([ids])[0]
    assert torch.equal(bits(scored), bits(got)) and len(scored) == 39


def test_limits_before_the_softplus_are_another_model_D12(hybrid, plain_hybrid, tokens) -> None:
    """The control of the test above: limits change what the float64 maths says by far more than is tolerated."""
    ids = tokens(40)
    with torch.no_grad():
        a, b = (
            plain_hybrid(hybrid("float32", time_step_limit=limits)).logprobs(ids)
            for limits in ([0.001, 0.1], None)
        )
    assert (a - b).abs().max() > 1e-2


@pytest.mark.parametrize("cast", ["bfloat16", "double"])
def test_a_cast_leaves_float32_parameters_A14(hybrid, tokens, cast: str) -> None:
    """A_log, D, dt_bias, the router's bias and the cache's scales: none is cast, and no bit of the forward moves."""
    model, ids = hybrid(), tokens(60)
    want = hidden(model, ids)
    exact = {path: w.master.clone() for path, w in model.weights() if w.exact}
    assert {path.split(".")[-1] for path in exact} == {"A_log", "D", "dt_bias", "bias"}
    getattr(model, cast)()
    for path, weight in model.weights():
        if path in exact:
            assert torch.equal(bits(weight.master), bits(exact[path])), path
        else:
            assert weight.master.dtype == getattr(torch, cast), path
    assert torch.equal(bits(hidden(model, ids)), bits(want))


def test_the_bias_chooses_and_weighs_nothing(hybrid, plain_hybrid, tokens) -> None:
    """Biases of +-5 decide every choice; gates stay the scores, divided by their sum, times the scaling."""
    model, ids = hybrid("float32"), tokens(30)
    bias = torch.tensor([5.0, -5.0, 5.0, -5.0, -5.0, 5.0, -5.0, -5.0])
    for layer in (1, 5):
        model.blocks[layer].mixer.bias.assign(bias)
    chosen: list[Tensor] = []

    def look(site: Any, name: str, value: Any) -> None:
        if name == "choose":
            chosen.append(value[1])

    with torch.no_grad():
        got = um.logprobs(model, [ids], context=lambda step: LocalContext(step, onlooker=look))[0]
        want = plain_hybrid(model).logprobs(ids)
    assert (got.double() - want).abs().max() < 1e-4
    assert len(chosen) == 2
    assert all(set(row.tolist()) == {0, 2, 5} for ids_TK in chosen for row in ids_TK)
