"""A small Nemotron-H with every kind of layer, and the same architecture as plain float64 maths. Loaded by conftest."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unified_models.model import LanguageModel, bind_numerics
from unified_models.models import nemotron_h
from unified_models.tiny import randomize

HYBRID: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "layers_block_type": ["mamba", "moe", "attention", "mamba", "mlp", "moe"],
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "ssm_state_size": 12,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 32,
}

MAMBA = ("conv", "conv_bias", "dt_bias", "A_log", "D", "norm")

QUANTIZED: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "MIXED_PRECISION",
    "kv_cache_quant_algo": "FP8",
    "quantized_layers": {
        f"backbone.layers.{layer}.mixer.{name}_proj": {"quant_algo": algorithm, **more}
        for layers, names, algorithm, more in (
            ((0, 3), ("in", "out"), "FP8", {}),
            ((1,), [f"experts.{e}.{n}" for e in range(8) for n in ("up", "down")], "NVFP4", {}),
            ((5,), [f"experts.{e}.{n}" for e in range(8) for n in ("up", "down")], "FP8", {}),
            ((1, 5), ("shared_experts.up", "shared_experts.down"), "NVFP4", {"four_over_six": 1}),
            ((4,), ("up", "down"), "FP8", {}),
        )
        for layer in layers
        for name in names
    }
    | {"lm_head": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
}


def build(numerics: str = "deployed", seed: int = 0, **overrides: Any) -> LanguageModel:
    model = nemotron_h.Model(nemotron_h.Config.tiny(**HYBRID | overrides))
    bind_numerics(model, numerics)
    randomize(model, seed)
    return model


def through(x: Tensor, value: Tensor) -> Tensor:
    """`value`, whose gradient goes straight to x."""
    return x + (value.double() - x).detach()


def e4m3(x: Tensor) -> Tensor:
    return x.clamp(-448, 448).to(torch.float8_e4m3fn).float()


class Hybrid:
    """Mamba-2 (section 2: the recurrence), grouped-query attention and experts, one sequence in float64.

    w: module path to master, as doubles. `deployed` repeats the roundings between operators, of caches and of weights,
    each with a straight-through derivative; those within the scan it does not know. `chosen`: experts of each
    token by module path, where they are given. It shares the configuration and the names with the model, and no
    line of code.
    """

    def __init__(self, model: LanguageModel, deployed: bool = False, master: bool = False) -> None:
        self.cfg, self.deployed, self.chosen = model.config, deployed, dict[str, Tensor]()
        self.w = {p: m.master.detach().double().requires_grad_() for p, m in model.weights()}
        self.values = dict(self.w)
        if deployed and not master:
            for path, weight in model.weights():
                self.values[path] = through(self.w[path], weight().dequantized())

    def round(self, x: Tensor) -> Tensor:
        return through(x, x.detach().to(torch.bfloat16)) if self.deployed else x

    def linear(self, x: Tensor, name: str, expert: int | None = None) -> Tensor:
        w, scale = self.values[name], self.values.get(f"{name}.input_scale")
        if expert is not None:
            w = w[expert]
        if self.deployed and scale is not None:
            scale = (scale if expert is None else scale[expert]).detach().float()
            x = through(x, e4m3(x.detach().float() * (1 / scale)).double() * scale.double())
        return x @ w.T

    def rms(self, x: Tensor, name: str) -> Tensor:
        y = x / (x.square().mean(-1, keepdim=True) + self.cfg.layer_norm_epsilon).sqrt()
        return self.round(y * self.values[name])

    def mamba(self, x: Tensor, name: str) -> Tensor:
        cfg, w = self.cfg, {k: self.values[f"{name}.{k}"] for k in MAMBA}
        H, P, N, G = cfg.mamba_num_heads, cfg.mamba_head_dim, cfg.ssm_state_size, cfg.n_groups
        projected = self.round(self.linear(x, f"{name}.in_proj"))
        z, xbc, dt = projected.split((H * P, H * P + 2 * G * N, H), -1)
        K = cfg.conv_kernel
        padded = torch.cat((xbc.new_zeros(K - 1, xbc.shape[1]), xbc))
        taps = [w["conv"][:, 0, k] * padded[k : k + len(x)] for k in range(K)]
        convolved = w["conv_bias"] + torch.stack(taps).sum(0)
        convolved = self.round(convolved * torch.sigmoid(convolved))
        inner, b, c = convolved.split((H * P, G * N, G * N), -1)
        inner, b, c = inner.unflatten(1, (H, P)), b.unflatten(1, (G, N)), c.unflatten(1, (G, N))
        steps = torch.log1p((dt + w["dt_bias"]).exp()).clamp(*cfg.time_step_limit)
        state, rows = inner.new_zeros(H, P, N), []
        for t in range(len(x)):
            b_H, c_H = (v[t].repeat_interleave(H // G, 0) for v in (b, c))
            keep = torch.exp(-steps[t] * w["A_log"].exp())[:, None, None]
            added = steps[t][:, None, None] * inner[t][..., None] * b_H[:, None]
            state = keep * state + added
            rows.append((state * c_H[:, None]).sum(-1) + w["D"][:, None] * inner[t])
        y = self.round(torch.stack(rows).flatten(1)) * z * torch.sigmoid(z)
        y = y.unflatten(1, (G, -1))
        y = y / (y.square().mean(-1, keepdim=True) + cfg.layer_norm_epsilon).sqrt()
        y = self.round(self.round(y.flatten(1)) * w["norm"])
        return self.round(self.linear(y, f"{name}.out_proj"))

    def cached(self, x: Tensor, scale: str) -> Tensor:
        """Keys or values as a cache of FP8 gives them back, where there is one."""
        if not self.deployed or scale not in self.values:
            return x
        s = self.values[scale].detach().float()
        return through(x, e4m3(x.detach().float() / s) * s)

    def attention(self, x: Tensor, name: str) -> Tensor:
        D, heads = self.cfg.head_dim, self.cfg.num_attention_heads
        q, k, v = (self.round(self.linear(x, f"{name}.{m}_proj")) for m in "qkv")
        k, v = self.cached(k, f"{name}.k_scale"), self.cached(v, f"{name}.v_scale")
        q, k, v = (rows.unflatten(1, (-1, D)) for rows in (q, k, v))
        outs = []
        for h in range(heads):
            g = h * k.shape[1] // heads
            s = q[:, h] @ k[:, g].T / math.sqrt(D)
            later = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
            outs.append(s.masked_fill(later, -math.inf).softmax(-1) @ v[:, g])
        return self.round(self.linear(self.round(torch.cat(outs, 1)), f"{name}.o_proj"))

    def mlp(self, x: Tensor, name: str, expert: int | None = None, end: str = "_proj") -> Tensor:
        up = self.round(self.linear(x, f"{name}.up{end}", expert))
        hidden = self.round(up.clamp(min=0) ** 2)
        return self.round(self.linear(hidden, f"{name}.down{end}", expert))

    def moe(self, x: Tensor, name: str) -> Tensor:
        cfg = self.cfg
        scores = torch.sigmoid(self.linear(x, f"{name}.gate"))
        best = (scores + self.values[f"{name}.bias"]).argsort(descending=True)
        chosen = self.chosen.get(name, best[:, : cfg.num_experts_per_tok])
        small = x
        if cfg.moe_latent_size:
            small = self.round(self.linear(x, f"{name}.fc1_latent_proj"))
        outs = []
        for t in range(len(x)):
            g = scores[t, chosen[t]]
            g = g / g.sum() * cfg.routed_scaling_factor
            each = [self.mlp(small[t], f"{name}.experts", int(e), "") for e in chosen[t]]
            outs.append(sum(v * y for v, y in zip(g, each, strict=True)))
        routed = self.round(torch.stack(outs))
        if cfg.moe_latent_size:
            routed = self.round(self.linear(routed, f"{name}.fc2_latent_proj"))
        return self.round(routed + self.mlp(x, f"{name}.shared_experts"))

    def block(self, layer: int, x: Tensor) -> Tensor:
        mixer = getattr(self, self.cfg.layers_block_type[layer])
        return self.round(x + mixer(self.rms(x, f"blocks.{layer}.norm"), f"blocks.{layer}.mixer"))

    def logits(self, ids: Tensor) -> Tensor:
        x = self.values["embed"][ids]
        for layer in range(len(self.cfg.layers_block_type)):
            x = self.block(layer, x)
        return self.linear(self.rms(x, "norm"), "head")

    def logprobs(self, sequence: Sequence[int]) -> Tensor:
        ids = torch.tensor(sequence)
        return self.logits(ids[:-1]).log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
