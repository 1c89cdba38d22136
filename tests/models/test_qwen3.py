"""Qwen3: the whole model against an independent one in float64, its config, tied heads, and its bits in the engine."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unified_models as um
from unified_models.checkpoint import save
from unified_models.model import bind_numerics
from unified_models.models.qwen3 import Config, Model
from unified_models.tiny import randomize

LENGTHS = (1, 0, 129, 3, 65)
FP8 = {
    "quant_algo": "MIXED_PRECISION",
    "quantized_layers": {
        f"model.layers.{layer}.{name}_proj": {"quant_algo": "FP8"}
        for layer in range(3)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.down")
    },
    "kv_cache_quant_algo": "FP8",
}


def make(numerics: str, **overrides: object) -> Model:
    model = Model(Config.tiny(**overrides))
    randomize(model, 3)
    bind_numerics(model, numerics)
    model.commit()
    return model


def make_sequences(vocab: int, lengths: Sequence[int] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in lengths]


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, theta: float) -> Tensor:
    """Each half-split pair as a complex number times e^{i angle}."""
    T, _, D = x.shape
    angles = torch.outer(torch.arange(T).double(), theta ** -(torch.arange(0, D, 2).double() / D))
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.exp(1j * angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), -1)


def independent_logprobs(cfg: Config, w: Mapping[str, Tensor], ids: Sequence[int]) -> Tensor:
    """Logprobs of tokens 1, 2, ... of one sequence, in the precision of the weights."""
    eps, D = cfg.rms_norm_eps, cfg.head_dim
    each = cfg.num_attention_heads // cfg.num_key_value_heads
    x = w["embed"][torch.tensor(ids)]
    later = torch.ones(len(ids), len(ids)).triu(1).bool()
    for layer in range(cfg.num_hidden_layers):
        at = f"blocks.{layer}"
        u = normed(x, w[f"{at}.attention_norm"], eps)
        q, k, v = (
            (u @ w[f"{at}.attention.{n}_proj"].T).view(len(ids), -1, D) for n in ("q", "k", "v")
        )
        q = turned(normed(q, w[f"{at}.attention.q_norm"], eps), cfg.rope_theta)
        k = turned(normed(k, w[f"{at}.attention.k_norm"], eps), cfg.rope_theta)
        k, v = (rows.repeat_interleave(each, 1) for rows in (k, v))
        scores = torch.einsum("thd,nhd->htn", q, k) / D**0.5
        p = scores.masked_fill(later, -torch.inf).softmax(-1)
        x = x + torch.einsum("htn,nhd->thd", p, v).flatten(1) @ w[f"{at}.attention.o_proj"].T
        u = normed(x, w[f"{at}.mlp_norm"], eps)
        gate, up = u @ w[f"{at}.mlp.gate_proj"].T, u @ w[f"{at}.mlp.up_proj"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[f"{at}.mlp.down_proj"].T
    head = w["embed"] if cfg.tie_word_embeddings else w["head"]
    logits = normed(x, w["norm"], eps) @ head.T
    return logits[:-1].log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_logprobs_and_backward_against_float64(tied: bool) -> None:
    """Sums of up to 192 float32 terms through three blocks: a few hundred ulps of a logprob near 10."""
    model = make("float32", tie_word_embeddings=tied)
    sequences = make_sequences(512)
    lps = um.logprobs(model, sequences)
    torch.cat(lps).sum().backward()
    wide = {
        path: weight.master.detach().double().requires_grad_() for path, weight in model.weights()
    }
    scored = [s for s in sequences if len(s) > 1]
    expected = [independent_logprobs(model.config, wide, s) for s in scored]
    torch.cat(expected).sum().backward()
    got = [lp for lp in lps if len(lp)]
    assert sum(map(len, got)) == sum(len(s) - 1 for s in scored) == 194
    for a, b in zip(got, expected, strict=True):
        assert (a.detach().double() - b.detach()).abs().max() < 1e-4
    for path, weight in model.weights():
        norm = wide[path].grad.norm()
        assert norm > 0, path
        assert (weight.master.grad.double() - wide[path].grad).norm() < 2e-5 * norm, path


@pytest.mark.parametrize("quantized", [False, True], ids=["bfloat16", "fp8"])
def test_engine_and_training_have_the_same_bits(quantized: bool) -> None:
    """Sampled under little memory, small steps and a prefix cache; recomputed in one pack."""
    model = make("deployed", **({"quantization_config": FP8} if quantized else {}))
    engine = um.Engine(model, cache_tokens=208, step_tokens=24, max_sequences=5, poison=True)
    prompts = make_sequences(512, (31, 15, 16, 30, 1, 17, 64, 100))
    prompts += [prompts[-1][:80] + [7]]
    outs = engine.generate(prompts, um.Sampling(max_tokens=40, temperature=0.8, seed=0))
    assert engine.stats.preemptions > 0 and engine.stats.prefix_hits > 0
    whole = [p + out.ids for p, out in zip(prompts, outs, strict=True)]
    trained = um.logprobs(model, whole, temperature=0.8)
    compared = um.verify.bits(
        [out.logprobs for out in outs],
        [lp.detach()[len(p) - 1 :] for lp, p in zip(trained, prompts, strict=True)],
    )
    assert (compared.compared, compared.unequal) == (40 * len(prompts), 0)


@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_save_and_load(tmp_path: Path, tied: bool) -> None:
    model = make("deployed", tie_word_embeddings=tied)
    save(model, tmp_path / "a")
    again = um.load(tmp_path / "a")
    names = [name for name, _ in um.named_tensors(again)]
    assert ("lm_head.weight" in names) == (not tied)
    assert "model.layers.0.self_attn.q_norm.weight" in names
    lps = [um.logprobs(m, make_sequences(512)) for m in (model, again)]
    compared = um.verify.bits(*([lp.detach() for lp in each] for each in lps))
    assert compared.compared == 194 and compared.unequal == 0


def test_a_cache_scale_that_is_no_positive_number_stops(tmp_path: Path) -> None:
    model = make("deployed", quantization_config=FP8)
    save(model, tmp_path / "a")
    state = load_file(tmp_path / "a/model.safetensors")
    name = "model.layers.1.self_attn.k_proj.k_scale"
    state[name] = torch.zeros(())
    save_file(state, tmp_path / "a/model.safetensors")
    with pytest.raises(ValueError, match=rf"{name} is 0\.0, expected a finite number above 0"):
        um.load(tmp_path / "a")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"num_attention_heads": 3}, "num_attention_heads = 3, num_key_value_heads = 2"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding_attention"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_config_refuses_what_is_not_here(change: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Config.tiny(**change)


def test_config_reads_what_transformers_writes() -> None:
    raw = Config.tiny().to_json()
    theta = raw.pop("rope_theta")
    written = raw | {
        "rope_parameters": {"rope_theta": theta, "rope_type": "default"},
        "layer_types": ["full_attention"] * 3,
    }
    assert Config.from_json(written) == Config.tiny()
