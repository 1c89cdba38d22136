"""Qwen3, dense (Qwen3 technical report, section 2): grouped-query attention with normed queries and keys, and a gated
MLP.

T tokens  M model width  V vocabulary  H query heads  G key heads  D head dim  F width of the MLP
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from unified_models import ops
from unified_models.config import fields_from, require
from unified_models.context import (
    BFLOAT16_RECORD,
    Context,
    Rope,
    Rows,
    StaticFP8,
    Weight,
    cache_scale,
)
from unified_models.model import LanguageModel
from unified_models.quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class Config:
    """config.json as released; `from_json` also reads the form that transformers 5 writes."""

    vocab_size: int  # V
    hidden_size: int  # M
    num_hidden_layers: int
    num_attention_heads: int  # H
    num_key_value_heads: int  # G
    head_dim: int  # D
    intermediate_size: int  # F
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int  # tokens
    tie_word_embeddings: bool  # the head is the embedding
    quantization_config: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        H, G = self.num_attention_heads, self.num_key_value_heads
        require(H % G == 0, num_attention_heads=H, num_key_value_heads=G)
        require(self.head_dim % 2 == 0, head_dim=self.head_dim)
        head = self.quantization.stated("lm_head")
        require(
            not self.tie_word_embeddings or head in (None, "bfloat16"),
            tie_word_embeddings=True,
            lm_head=head,
        )

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], source: str = "config.json") -> "Config":
        """Read a config.json; ValueError names a key that is unknown, missing, contradictory or of another model."""
        raw = dict(raw)
        parameters = raw.pop("rope_parameters", None) or {}
        require(parameters.get("rope_type", "default") == "default", rope_parameters=parameters)
        raw.setdefault("rope_theta", parameters.get("rope_theta"))
        raw["rope_theta"] = raw["rope_theta"] and float(raw["rope_theta"])
        kinds = set(raw.pop("layer_types", None) or ()) - {"full_attention"}
        require(not kinds, layer_types=sorted(kinds), known=["full_attention"])
        given = {key: value for key, value in raw.items() if value is not None or key in FIXED}
        return fields_from(cls, given, fixed=FIXED, ignored=IGNORED, source=source)

    def to_json(self) -> dict[str, Any]:
        """The released form, which transformers and vLLM read."""
        given = {key: value for key, value in asdict(self).items() if value is not None}
        return {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"} | FIXED | given

    @classmethod
    def tiny(cls, **overrides: Any) -> "Config":
        """Small numbers that keep every part."""
        return cls.from_json(TINY | overrides)

    @cached_property
    def quantization(self) -> Quantization:
        return Quantization.from_json(self.quantization_config, "config.json")


class Model(LanguageModel):
    """Embedding, blocks, final norm; `logits` apart."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config, self.eps = cfg, cfg.rms_norm_eps
        self.embed = Weight("vocab", cfg.vocab_size, None, cfg.hidden_size)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.num_hidden_layers))
        self.norm = Weight(None, cfg.hidden_size)
        self.head = None
        if not cfg.tie_word_embeddings:
            stated = cfg.quantization.stated("lm_head")
            self.head = Weight("vocab", cfg.vocab_size, None, cfg.hidden_size, format=stated)

    def start(self, ids_T: Tensor, ctx: Context) -> Tensor:
        return ctx.embed(ids_T, self.embed)

    def finish(self, x_TM: Tensor, ctx: Context) -> Tensor:
        return ops.rms_norm(x_TM, self.norm().value, self.eps)

    def logits(self, hidden_TM: Tensor, ctx: Context) -> Tensor:
        return ctx.linear(hidden_TM, self.head or self.embed, dtype=torch.float32)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then the MLP, each behind a norm and added to its input."""

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        self.eps = cfg.rms_norm_eps
        self.attention_norm = Weight(None, cfg.hidden_size)
        self.attention = Attention(cfg, f"layers.{layer}.self_attn")
        self.mlp_norm = Weight(None, cfg.hidden_size)
        self.mlp = MLP(cfg, f"layers.{layer}.mlp")

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        normed_TM = ops.rms_norm(x_TM, self.attention_norm().value, self.eps)
        x_TM = x_TM + self.attention(normed_TM, ctx)
        normed_TM = ops.rms_norm(x_TM, self.mlp_norm().value, self.eps)
        return x_TM + self.mlp(normed_TM, ctx)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Grouped-query attention; queries and keys are normed head by head, then turned."""

    def __init__(self, cfg: Config, where: str) -> None:
        super().__init__()
        H, G, D, M = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.hidden_size
        self.D, self.eps, stated = D, cfg.rms_norm_eps, cfg.quantization.stated
        self.rope = Rope(D, cfg.rope_theta, halves=True)
        self.q_proj = Weight("heads", H * D, None, M, format=stated(f"{where}.q_proj"))
        self.k_proj = Weight("heads", G * D, None, M, format=stated(f"{where}.k_proj"))
        self.v_proj = Weight("heads", G * D, None, M, format=stated(f"{where}.v_proj"))
        self.q_norm = Weight(None, D)
        self.k_norm = Weight(None, D)
        self.o_proj = Weight(None, M, "heads", H * D, format=stated(f"{where}.o_proj"))
        quantized = cfg.quantization.kv_cache == "FP8"
        self.keys_values = Rows(2 * G * D, record=StaticFP8() if quantized else BFLOAT16_RECORD)
        self.k_scale = cache_scale() if quantized else None
        self.v_scale = cache_scale() if quantized else None

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        q, k, v = ctx.linear(x_TM, self.q_proj, self.k_proj, self.v_proj)
        q_THD, k_TGD, v_TGD = (rows.unflatten(-1, (-1, self.D)) for rows in (q, k, v))
        q_THD = ops.rms_norm(q_THD, self.q_norm().value, self.eps)
        k_TGD = ops.rms_norm(k_TGD, self.k_norm().value, self.eps)
        q_THD, k_TGD = (ops.rope(rows, ctx.positions_T, self.rope) for rows in (q_THD, k_TGD))
        scales = (self.k_scale, self.v_scale) if self.k_scale and self.v_scale else None
        o_THD = ctx.attend(q_THD, k_TGD, v_TGD, self.keys_values, scale=self.D**-0.5, scales=scales)
        return ctx.linear(o_THD.flatten(1), self.o_proj)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, cfg: Config, where: str) -> None:
        super().__init__()
        M, F, stated = cfg.hidden_size, cfg.intermediate_size, cfg.quantization.stated
        self.gate_proj = Weight(None, F, None, M, format=stated(f"{where}.gate_proj"))
        self.up_proj = Weight(None, F, None, M, format=stated(f"{where}.up_proj"))
        self.down_proj = Weight(None, M, None, F, format=stated(f"{where}.down_proj"))

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        gate_TF, up_TF = ctx.linear(x_TM, self.gate_proj, self.up_proj)
        return ctx.linear(ops.swiglu(gate_TF, up_TF), self.down_proj)  # type: ignore[no-any-return]


NAMES = {
    "embed": "model.embed_tokens.weight",
    "blocks.{l}.attention_norm": "model.layers.{l}.input_layernorm.weight",
    "blocks.{l}.attention.{w:q_proj|k_proj|v_proj|o_proj|q_norm|k_norm}": "model.layers.{l}.self_attn.{w}.weight",
    "blocks.{l}.attention.k_scale": "model.layers.{l}.self_attn.k_proj.k_scale",
    "blocks.{l}.attention.v_scale": "model.layers.{l}.self_attn.v_proj.v_scale",
    "blocks.{l}.mlp_norm": "model.layers.{l}.post_attention_layernorm.weight",
    "blocks.{l}.mlp.{w:gate_proj|up_proj|down_proj}": "model.layers.{l}.mlp.{w}.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}
SAME = {"lm_head.weight": "model.embed_tokens.weight"}  # with tie_word_embeddings

FIXED: dict[str, Any] = {
    "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
}
"""Keys that this file knows with one value only; another value is refused."""

IGNORED = {
    "attention_dropout": "no dropout in RL",
    "initializer_range": "a checkpoint has its values",
    "max_window_layers": "no layer has a window",
    "pad_token_id": "packs have no padding",
}

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
