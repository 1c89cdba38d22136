"""Small models with every kind of layer, and DeepSeek-V4 as plain float64 maths (Nemotron-H: hybrid.py)."""

import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models.model import LanguageModel, bind_numerics
from unified_models.models import deepseek_v4
from unified_models.tiny import randomize

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "compress_ratios": (0, 4, 8, 4),
    "num_attention_heads": 4,
    "head_dim": 72,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 32,
    "o_groups": 2,
    "o_lora_rank": 16,
    "sliding_window": 16,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 3,
    "moe_intermediate_size": 32,
    "num_hash_layers": 2,
}


def build(numerics: str = "deployed", seed: int = 0, **overrides: Any) -> LanguageModel:
    model = deepseek_v4.Model(deepseek_v4.Config.tiny(**SMALL | overrides))
    bind_numerics(model, numerics)
    randomize(model, seed)
    return model


class Plain:
    """The technical report's section 2, one sequence in float64, from `w`: module path to master, as doubles.

    It shares the configuration and the names with the model, and no line of code.
    """

    def __init__(self, cfg: Any, w: dict[str, Tensor], tables: dict[str, Tensor]) -> None:
        self.cfg, self.w, self.tables = cfg, w, tables

    def rms(self, x: Tensor, name: str = "") -> Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + self.cfg.rms_norm_eps).sqrt()
        return y * self.w[name] if name else y

    def rope(self, x: Tensor, positions: Tensor, ratio: int, sign: int = 1) -> Tensor:
        """The last dims as complex numbers, times e^{i t f}."""
        cfg, R = self.cfg, self.cfg.qk_rope_head_dim
        theta = cfg.compress_rope_theta if ratio else cfg.rope_theta
        f = [theta ** (-2 * i / R) for i in range(R // 2)]
        if ratio:
            yarn = cfg.rope_scaling
            at = [  # the pair that turns so often over the original context
                R
                * math.log(yarn["original_max_position_embeddings"] / (turns * 2 * math.pi))
                / (2 * math.log(theta))
                for turns in (yarn["beta_fast"], yarn["beta_slow"])
            ]
            low, high = max(math.floor(at[0]), 0), min(math.ceil(at[1]), R - 1)
            slow = [min(max((i - low) / (high - low), 0), 1) for i in range(R // 2)]
            f = [v * (1 - s) + v / yarn["factor"] * s for v, s in zip(f, slow, strict=True)]
        angle = positions.double()[:, None] * torch.tensor(f, dtype=torch.float64) * sign
        turn = torch.polar(torch.ones_like(angle), angle)
        turn = turn.view(len(x), *(1,) * (x.dim() - 2), -1)
        pairs = torch.view_as_complex(x[..., -R:].unflatten(-1, (-1, 2)).contiguous()) * turn
        return torch.cat((x[..., :-R], torch.view_as_real(pairs).flatten(-2)), -1)

    def hyper(self, streams: Tensor, name: str) -> tuple[Tensor, ...]:
        cfg, X = self.cfg, self.cfg.hc_mult
        m = self.rms(streams.flatten(1)) @ self.w[f"{name}.fn"].T
        scale, base = self.w[f"{name}.scale"], self.w[f"{name}.base"]
        if len(scale) == 1:
            return (torch.sigmoid(m * scale + base) + cfg.hc_eps,)
        pre = torch.sigmoid(m[:, :X] * scale[0] + base[:X]) + cfg.hc_eps
        post = 2 * torch.sigmoid(m[:, X : 2 * X] * scale[1] + base[X : 2 * X])
        mix = (m[:, 2 * X :] * scale[2] + base[2 * X :]).unflatten(-1, (X, X)).softmax(-1)
        mix = mix + cfg.hc_eps
        mix = mix / (mix.sum(1, keepdim=True) + cfg.hc_eps)
        for _ in range(cfg.hc_sinkhorn_iters - 1):
            mix = mix / (mix.sum(2, keepdim=True) + cfg.hc_eps)
            mix = mix / (mix.sum(1, keepdim=True) + cfg.hc_eps)
        return pre, post, mix

    def entries(self, x: Tensor, name: str, ratio: int) -> Tensor:
        c, z = x @ self.w[f"{name}.wkv"].T, x @ self.w[f"{name}.wgate"].T
        z = z + self.w[f"{name}.ape"][torch.arange(len(x)) % ratio]
        dim, out = len(self.w[f"{name}.norm"]), []
        for w in range(len(x) // ratio):
            own, before = slice(w * ratio, (w + 1) * ratio), slice((w - 1) * ratio, w * ratio)
            if ratio == 4:
                gates, values = z[own, dim:], c[own, dim:]
                if w:
                    gates = torch.cat((z[before, :dim], gates))
                    values = torch.cat((c[before, :dim], values))
            else:
                gates, values = z[own], c[own]
            out.append((gates.softmax(0) * values).sum(0))
        if not out:
            return x.new_zeros(0, dim)
        normed = self.rms(torch.stack(out), f"{name}.norm")
        return self.rope(normed, torch.arange(len(out)) * ratio, ratio)

    def picks(self, x: Tensor, q_lora: Tensor, name: str, at: Tensor) -> list[list[int]]:
        cfg = self.cfg
        keys = self.entries(x, f"{name}.compressor", 4)
        q = (q_lora @ self.w[f"{name}.wq_b"].T).unflatten(-1, (cfg.index_n_heads, -1))
        scores = (self.rope(q, at, 4) @ keys.T).relu() * (x @ self.w[f"{name}.weights_proj"].T)[
            ..., None
        ]
        rows = scores.sum(1)
        return [
            sorted(rows[t, : (t + 1) // 4].argsort(descending=True)[: cfg.index_topk].tolist())
            for t in range(len(x))
        ]

    def attention(self, x: Tensor, name: str, ratio: int) -> Tensor:
        cfg, w, at = self.cfg, self.w, torch.arange(len(x))
        q_lora = self.rms(x @ w[f"{name}.wq_a"].T, f"{name}.q_norm")
        q = (q_lora @ w[f"{name}.wq_b"].T).unflatten(-1, (-1, cfg.head_dim))
        q = self.rope(self.rms(q), at, ratio)
        kv = self.rope(self.rms(x @ w[f"{name}.wkv"].T, f"{name}.kv_norm"), at, ratio)
        old = self.entries(x, f"{name}.compressor", ratio) if ratio else kv[:0]
        seen = [list(range((t + 1) // ratio)) if ratio else [] for t in range(len(x))]
        if ratio == 4:
            seen = self.picks(x.detach(), q_lora.detach(), f"{name}.indexer", at)
        outs = []
        for t in range(len(x)):
            keys = torch.cat((old[seen[t]], kv[max(0, t - cfg.sliding_window + 1) : t + 1]))
            s = q[t] @ keys.T * cfg.head_dim**-0.5
            s = torch.cat((s, w[f"{name}.sinks"][:, None]), 1).softmax(1)
            outs.append(s[:, :-1] @ keys)
        o = self.rope(torch.stack(outs), at, ratio, sign=-1)
        o = o.unflatten(1, (cfg.o_groups, -1)).flatten(2)
        wo_a = w[f"{name}.wo_a"].unflatten(0, (cfg.o_groups, -1))
        return torch.einsum("tgk,gnk->tgn", o, wo_a).flatten(1) @ w[f"{name}.wo_b"].T

    def expert(self, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        limit = self.cfg.swiglu_limit
        a, b = (x @ gate.T).clamp(max=limit), (x @ up.T).clamp(-limit, limit)
        return (a * torch.sigmoid(a) * b) @ down.T

    def moe(self, x: Tensor, ids: Tensor, name: str) -> Tensor:
        cfg, w = self.cfg, self.w
        scores = torch.log1p((x @ w[f"{name}.gate"].T).exp()).sqrt()
        if f"{name}.tid2eid" in self.tables:
            chosen = self.tables[f"{name}.tid2eid"][ids]
        else:
            biased = scores + w[f"{name}.bias"]
            chosen = biased.argsort(descending=True)[:, : cfg.num_experts_per_tok]
        outs = []
        for t in range(len(x)):
            g = scores[t, chosen[t]]
            g = g / g.sum() * cfg.routed_scaling_factor
            e = [[w[f"{name}.experts.{m}"][i] for m in ("gate", "up", "down")] for i in chosen[t]]
            outs.append(sum(v * self.expert(x[t], *m) for v, m in zip(g, e, strict=True)))
        shared = self.expert(x, w[f"{name}.w1"], w[f"{name}.w3"], w[f"{name}.w2"])
        return torch.stack(outs) + shared

    def hidden(self, ids: Tensor) -> Tensor:
        streams = self.w["embed"][ids][:, None].repeat(1, self.cfg.hc_mult, 1)
        for layer, ratio in enumerate(self.cfg.compress_ratios[: self.cfg.num_hidden_layers]):
            b = f"blocks.{layer}"
            for part in ("attn", "ffn"):
                pre, post, mix = self.hyper(streams, f"{b}.hc_{part}")
                x = self.rms((pre[..., None] * streams).sum(1), f"{b}.{part}_norm")
                out = (
                    self.attention(x, f"{b}.attention", ratio)
                    if part == "attn"
                    else self.moe(x, ids, f"{b}.ffn")
                )
                streams = post[..., None] * out[:, None] + mix.transpose(1, 2) @ streams
        (pre,) = self.hyper(streams, "hc_head")
        return self.rms((pre[..., None] * streams).sum(1), "norm")

    def logprobs(self, sequence: Sequence[int], temperature: float = 1.0) -> Tensor:
        ids = torch.tensor(sequence)
        logits = self.hidden(ids[:-1]) @ self.w["head"].T / temperature
        return logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]


def plain_of(model: LanguageModel) -> Plain:
    w = {path: m.master.detach().double().requires_grad_() for path, m in model.weights()}
    return Plain(model.config, w, {path: t() for path, t in model.tables()})


@pytest.fixture
def tiny() -> Callable[..., LanguageModel]:
    return build


@pytest.fixture
def plain() -> Callable[[LanguageModel], Plain]:
    return plain_of


@pytest.fixture(scope="session")
def hybrid_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hybrid", Path(__file__).with_name("hybrid.py"))
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hybrid(hybrid_file: ModuleType) -> Callable[..., LanguageModel]:
    return hybrid_file.build


@pytest.fixture
def plain_hybrid(hybrid_file: ModuleType) -> Callable[..., Any]:
    return hybrid_file.Hybrid


@pytest.fixture
def tokens() -> Callable[..., list[int]]:
    """Random token ids: tokens(length, seed=0)."""

    def draw(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(0, SMALL["vocab_size"], (length,), generator=generator).tolist()

    return draw
