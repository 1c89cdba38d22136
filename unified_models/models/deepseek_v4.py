"""DeepSeek-V4 (technical report, section 2): shared-KV attention over a sliding window and compressed history,
hyper-connected residual streams, and experts routed by hash or by score.

T tokens  M model width  V vocabulary  X residual streams  H query heads  D head dim  J index heads  I index dim
G output groups  C channels of a projection  E experts  K experts (or entries) per token  F expert width
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from unified_models import ops
from unified_models.config import fields_from, require
from unified_models.context import (
    Context,
    Entries,
    Experts,
    LatentFP8,
    Pool,
    Rope,
    Rows,
    Table,
    VectorFP8,
    Weight,
)
from unified_models.model import LanguageModel


@dataclass(frozen=True, kw_only=True)
class Config:
    """config.json as released; `from_json` also reads the form that transformers writes."""

    vocab_size: int  # V
    hidden_size: int  # M
    num_hidden_layers: int
    num_attention_heads: int  # H
    head_dim: int  # D
    qk_rope_head_dim: int  # rotated dims, the last of D
    q_lora_rank: int
    o_groups: int  # G
    o_lora_rank: int
    sliding_window: int  # tokens a query sees, itself included
    compress_ratios: tuple[
        int, ...
    ]  # tokens an entry, by layer; 0: no entries; those past the last layer are MTP's
    index_n_heads: int  # J
    index_head_dim: int  # I
    index_topk: int  # entries a query reads where it has an indexer
    n_routed_experts: int  # E
    num_experts_per_tok: int  # K
    moe_intermediate_size: int  # F
    num_hash_layers: int  # first layers, where a table chooses the experts by token id
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int  # X
    hc_sinkhorn_iters: int
    hc_eps: float
    rms_norm_eps: float
    rope_theta: float  # layers without entries
    compress_rope_theta: float  # layers with entries
    rope_scaling: dict[str, Any] = field(default_factory=dict)  # YaRN, layers with entries
    max_position_embeddings: int  # tokens
    num_nextn_predict_layers: int = 0
    quantization_config: dict[str, Any] | None = None
    expert_dtype: str | None = None  # fp4 | fp8 | None: what the file holds
    bos_token_id: int | None = None
    eos_token_id: int | None = None

    def __post_init__(self) -> None:
        L = self.num_hidden_layers
        require(
            len(self.compress_ratios) >= L,
            compress_ratios=list(self.compress_ratios),
            num_hidden_layers=L,
        )
        require(
            self.num_hash_layers <= L, num_hash_layers=self.num_hash_layers, num_hidden_layers=L
        )
        H, G = self.num_attention_heads, self.o_groups
        require(H % G == 0, num_attention_heads=H, o_groups=G)
        K, E = self.num_experts_per_tok, self.n_routed_experts
        require(K <= E, num_experts_per_tok=K, n_routed_experts=E)
        for dim in (self.head_dim, self.index_head_dim):
            require(self.qk_rope_head_dim <= dim, qk_rope_head_dim=self.qk_rope_head_dim, of=dim)
        require(self.expert_dtype in (None, "fp4", "fp8"), expert_dtype=self.expert_dtype)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], source: str = "config.json") -> "Config":
        """Read a config.json; ValueError names a key that is unknown, missing, contradictory or of another model."""
        raw = from_transformers(raw) if "layer_types" in raw else raw
        return fields_from(cls, raw, fixed=FIXED, ignored=IGNORED, source=source)

    def to_json(self) -> dict[str, Any]:
        """The released form, which transformers and vLLM read."""
        given = {key: value for key, value in asdict(self).items() if value is not None}
        return (
            {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}
            | FIXED
            | given
        )

    @classmethod
    def tiny(cls, **overrides: Any) -> "Config":
        """Small numbers that keep every part, in whole 128-blocks."""
        return cls.from_json(TINY | overrides)

    @property
    def linear_format(self) -> str:
        """fp8: power-of-two or float32 scales, as the file has them."""
        if self.quantization_config is None:
            return "bfloat16"
        return "fp8" if self.quantization_config.get("scale_fmt") == "ue8m0" else "fp8_float32"

    @property
    def expert_format(self) -> str | None:
        if self.quantization_config is None:
            return "bfloat16"
        return {"fp4": "mxfp4", "fp8": self.linear_format, None: None}[self.expert_dtype]

    def rope(self, ratio: int) -> Rope:
        """Plain without entries; another base, stretched by YaRN, with them - for queries and all keys alike."""
        if ratio == 0 or not self.rope_scaling:
            return Rope(
                self.qk_rope_head_dim, self.compress_rope_theta if ratio else self.rope_theta
            )
        yarn = {key: self.rope_scaling[key] for key in YARN if key in self.rope_scaling}
        return Rope(self.qk_rope_head_dim, self.compress_rope_theta, **yarn)


class Model(LanguageModel):
    """Embedding, blocks over X residual streams, the streams collapsed, final norm; `logits` apart."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config, self.X, self.eps = cfg, cfg.hc_mult, cfg.rms_norm_eps
        self.embed = Weight("vocab", cfg.vocab_size, None, cfg.hidden_size)
        self.blocks = nn.ModuleList(Block(cfg, layer) for layer in range(cfg.num_hidden_layers))
        self.hc_head = HyperConnection(cfg, maps=cfg.hc_mult, scales=1)
        self.norm = Weight(None, cfg.hidden_size)
        self.head = Weight("vocab", cfg.vocab_size, None, cfg.hidden_size)

    @property
    def row(self) -> tuple[int, ...]:
        return (self.X, self.config.hidden_size)

    def start(self, ids_T: Tensor, ctx: Context) -> Tensor:
        return ctx.embed(ids_T, self.embed)[:, None].expand(-1, self.X, -1)

    def through(self, block: nn.Module, x: Tensor, ids_T: Tensor, ctx: Context) -> Tensor:
        return block(x, ids_T, ctx)  # type: ignore[no-any-return]

    def finish(self, streams_TXM: Tensor, ctx: Context) -> Tensor:
        return ops.rms_norm(self.hc_head(streams_TXM, ctx), self.norm().value, self.eps)

    def logits(self, hidden_TM: Tensor, ctx: Context) -> Tensor:
        return ctx.linear(hidden_TM, self.head, dtype=torch.float32)  # type: ignore[no-any-return]


class Block(nn.Module):
    """Attention, then experts, each between a collapse of the streams and a spread over them (2.2)."""

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        self.eps = cfg.rms_norm_eps
        self.hc_attn = HyperConnection(cfg, maps=cfg.hc_mult * (2 + cfg.hc_mult), scales=3)
        self.attn_norm = Weight(None, cfg.hidden_size)
        self.attention = Attention(cfg, cfg.compress_ratios[layer])
        self.hc_ffn = HyperConnection(cfg, maps=cfg.hc_mult * (2 + cfg.hc_mult), scales=3)
        self.ffn_norm = Weight(None, cfg.hidden_size)
        self.ffn = MoE(cfg, hashed=layer < cfg.num_hash_layers)

    def forward(self, streams_TXM: Tensor, ids_T: Tensor, ctx: Context) -> Tensor:
        x_TM, post_TX, comb_TXX = self.hc_attn(streams_TXM, ctx)
        out_TM = self.attention(ops.rms_norm(x_TM, self.attn_norm().value, self.eps), ctx)
        streams_TXM = ops.hyper_expand(out_TM, streams_TXM, post_TX, comb_TXX)
        x_TM, post_TX, comb_TXX = self.hc_ffn(streams_TXM, ctx)
        out_TM = self.ffn(ops.rms_norm(x_TM, self.ffn_norm().value, self.eps), ids_T, ctx)
        return ops.hyper_expand(out_TM, streams_TXM, post_TX, comb_TXX)


class HyperConnection(nn.Module):
    """Collapses the streams into a sublayer's input, and says how its output is spread over them (2.2)."""

    def __init__(self, cfg: Config, *, maps: int, scales: int) -> None:
        super().__init__()
        self.cfg = cfg
        self.fn = Weight(None, maps, None, cfg.hc_mult * cfg.hidden_size, format="float32")
        self.base = Weight(None, maps, format="float32")
        self.scale = Weight(None, scales, format="float32")

    def forward(self, streams_TXM: Tensor, ctx: Context) -> Any:
        cfg = self.cfg
        projected_TC = ctx.linear(streams_TXM.flatten(1), self.fn)
        mixes_TC = ops.hyper_normalize(projected_TC, streams_TXM, cfg.rms_norm_eps)
        scale, base_C = self.scale().value, self.base().value
        if len(scale) == 1:  # before the final norm: nothing is spread again
            return ops.hyper_collapse(
                streams_TXM, ops.sigmoid(mixes_TC * scale + base_C) + cfg.hc_eps
            )
        pre_TX, post_TX, comb_TXX = ops.hyper_maps(
            mixes_TC,
            scale,
            base_C,
            streams=cfg.hc_mult,
            iterations=cfg.hc_sinkhorn_iters,
            eps=cfg.hc_eps,
        )
        return ops.hyper_collapse(streams_TXM, pre_TX), post_TX, comb_TXX


class Attention(nn.Module):
    """One softmax over a sliding window and the compressed entries before it (2.3); one row is key and value."""

    def __init__(self, cfg: Config, ratio: int) -> None:
        super().__init__()
        self.D, self.G, self.eps, self.rope = (
            cfg.head_dim,
            cfg.o_groups,
            cfg.rms_norm_eps,
            cfg.rope(ratio),
        )
        H, D, M, R, fmt = (
            cfg.num_attention_heads,
            cfg.head_dim,
            cfg.hidden_size,
            cfg.o_lora_rank,
            cfg.linear_format,
        )
        self.wq_a = Weight(None, cfg.q_lora_rank, None, M, format=fmt)
        self.q_norm = Weight(None, cfg.q_lora_rank)
        self.wq_b = Weight("heads", H * D, None, cfg.q_lora_rank, format=fmt)
        self.wkv = Weight(None, D, None, M, format=fmt)
        self.kv_norm = Weight(None, D)
        self.sinks = Weight("heads", H, format="float32")
        self.wo_a = Weight("heads", self.G * R, None, H // self.G * D, format=fmt, groups=self.G)
        self.wo_b = Weight(None, M, "heads", self.G * R, format=fmt)
        self.window = Rows(D, keep=cfg.sliding_window, record=LatentFP8(cfg.qk_rope_head_dim))
        self.compressor = (
            Compressor(cfg, ratio, D, LatentFP8(cfg.qk_rope_head_dim)) if ratio else None
        )
        self.indexer = Indexer(cfg, ratio) if ratio == OVERLAPPING else None

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        q_lora, kv_TD = ctx.linear(x_TM, self.wq_a, self.wkv)
        q_lora = ops.rms_norm(q_lora, self.q_norm().value, self.eps)
        kv_TD = ops.rope(
            ops.rms_norm(kv_TD, self.kv_norm().value, self.eps), ctx.positions_T, self.rope
        )
        q_THD = ctx.linear(q_lora, self.wq_b).unflatten(-1, (-1, self.D))
        q_THD = ops.rms_norm(q_THD, None, self.eps, dtype=torch.float32)
        q_THD = ops.rope(q_THD, ctx.positions_T, self.rope, dtype=kv_TD.dtype)
        o_THD = ctx.attend_latent(
            q_THD,
            kv_TD,
            self.window,
            scale=self.D**-0.5,
            sinks_H=self.sinks().value,
            pool=self.compressor(x_TM, ctx) if self.compressor else None,
            picks_TK=self.indexer(x_TM, q_lora, ctx) if self.indexer else None,
        )
        o_THD = ops.rope(
            o_THD, ctx.positions_T, self.rope, inverse=True
        )  # values carried rope, too
        z_TGR = ctx.linear(o_THD.unflatten(1, (self.G, -1)).flatten(2), self.wo_a)
        return ctx.linear(z_TGR.flatten(1), self.wo_b)  # type: ignore[no-any-return]


class Compressor(nn.Module):
    """One entry for every `ratio` tokens (2.3.1 eq. 9-12 with overlapping windows, 2.3.2 eq. 20-23 without)."""

    def __init__(
        self, cfg: Config, ratio: int, dim: int, record: Any, *, frozen: bool = False
    ) -> None:
        super().__init__()
        self.eps, self.rope = cfg.rms_norm_eps, cfg.rope(ratio)
        self.entries = Entries(dim, stride=ratio, overlap=ratio == OVERLAPPING, record=record)
        C = self.entries.channels
        self.wkv = Weight(None, C, None, cfg.hidden_size, frozen=frozen)
        self.wgate = Weight(None, C, None, cfg.hidden_size, frozen=frozen)
        self.ape = Weight(None, ratio, None, C, format="float32", frozen=frozen, init="bias")
        self.norm = Weight(None, dim, frozen=frozen)

    def forward(self, x_TM: Tensor, ctx: Context) -> Pool:
        kv_TC, gate_TC = ctx.linear(x_TM, self.wkv, self.wgate, dtype=torch.float32)
        return ctx.compress(
            kv_TC,
            gate_TC,
            self.entries,
            bias=self.ape,
            norm=self.norm,
            eps=self.eps,
            rope=self.rope,
        )


class Indexer(nn.Module):
    """Picks the entries a query reads (2.3.1 eq. 13-17). A discrete choice: no gradient, frozen."""

    def __init__(self, cfg: Config, ratio: int) -> None:
        super().__init__()
        self.J, self.I, self.K, self.rope = (
            cfg.index_n_heads,
            cfg.index_head_dim,
            cfg.index_topk,
            cfg.rope(ratio),
        )
        self.wq_b = Weight(
            None, self.J * self.I, None, cfg.q_lora_rank, format=cfg.linear_format, frozen=True
        )
        self.weights_proj = Weight(None, self.J, None, cfg.hidden_size, frozen=True)
        self.compressor = Compressor(cfg, ratio, self.I, VectorFP8(), frozen=True)

    def forward(self, x_TM: Tensor, q_lora: Tensor, ctx: Context) -> Tensor:
        x_TM, q_lora = x_TM.detach(), q_lora.detach()
        pool = self.compressor(x_TM, ctx)
        q_TJI = ctx.linear(q_lora, self.wq_b).unflatten(-1, (self.J, self.I))
        q_TJI = ops.rope(q_TJI, ctx.positions_T, self.rope)
        weights_TJ = ctx.linear(x_TM, self.weights_proj).float() * (self.I**-0.5 * self.J**-0.5)
        return ctx.select(q_TJI, weights_TJ, pool, self.K, self)


class MoE(nn.Module):
    """Routed experts and one shared expert (2.1). The first layers route by token id, the rest by score + bias."""

    def __init__(self, cfg: Config, *, hashed: bool) -> None:
        super().__init__()
        E, M, F, self.K = (
            cfg.n_routed_experts,
            cfg.hidden_size,
            cfg.moe_intermediate_size,
            cfg.num_experts_per_tok,
        )
        self.scaling, self.limit = cfg.routed_scaling_factor, cfg.swiglu_limit
        self.gate = Weight(None, E, None, M)
        self.tid2eid = Table("vocab", cfg.vocab_size, None, self.K, upper=E) if hashed else None
        self.bias = None if hashed else Weight(None, E, format="float32", frozen=True)
        self.experts = Experts(E, M, F, limit=self.limit, format=cfg.expert_format)
        self.w1 = Weight(None, F, None, M, format=cfg.linear_format)
        self.w2 = Weight(None, M, None, F, format=cfg.linear_format)
        self.w3 = Weight(None, F, None, M, format=cfg.linear_format)

    def forward(self, x_TM: Tensor, ids_T: Tensor, ctx: Context) -> Tensor:
        scores_TE = ops.sqrt_softplus(ctx.linear(x_TM, self.gate, dtype=torch.float32))
        if self.tid2eid:
            ids_TK = ctx.lookup(ids_T, self.tid2eid)
        else:
            assert self.bias
            ids_TK = ctx.choose(scores_TE + self.bias().value, self.K, self)
        gates_TK = ops.route_weights(scores_TE, ids_TK, self.scaling)
        gate_TF, up_TF = ctx.linear(x_TM, self.w1, self.w3)
        shared_TM = ctx.linear(ops.swiglu(gate_TF, up_TF, self.limit), self.w2)
        return ctx.moe(x_TM, ids_TK, gates_TK, self.experts) + shared_TM  # type: ignore[no-any-return]


OVERLAPPING = 4  # the ratio whose windows overlap and whose entries an indexer picks

NAMES: dict[str, str | tuple[str, ...]] = {
    "embed": ("embed.weight", "embed_tokens.weight"),
    "blocks.{l}.{w:attn_norm|ffn_norm}": "layers.{l}.{w}.weight",
    "blocks.{l}.{h:hc_attn|hc_ffn}.{w:fn|base|scale}": "layers.{l}.{h}_{w}",
    "blocks.{l}.attention.{w:wq_a|wq_b|wkv|wo_a|wo_b|q_norm}": "layers.{l}.attn.{w}.weight",
    "blocks.{l}.attention.kv_norm": (
        "layers.{l}.attn.kv_norm.weight",
        "layers.{l}.attn.norm.weight",
    ),
    "blocks.{l}.attention.sinks": "layers.{l}.attn.attn_sink",
    "blocks.{l}.attention.compressor.{w:wkv|wgate|norm}": "layers.{l}.attn.compressor.{w}.weight",
    "blocks.{l}.attention.compressor.ape": "layers.{l}.attn.compressor.ape",
    "blocks.{l}.attention.indexer.{w:wq_b|weights_proj}": "layers.{l}.attn.indexer.{w}.weight",
    "blocks.{l}.attention.indexer.compressor.{w:wkv|wgate|norm}": "layers.{l}.attn.indexer.compressor.{w}.weight",
    "blocks.{l}.attention.indexer.compressor.ape": "layers.{l}.attn.indexer.compressor.ape",
    "blocks.{l}.ffn.gate": "layers.{l}.ffn.gate.weight",
    "blocks.{l}.ffn.{w:tid2eid|bias}": "layers.{l}.ffn.gate.{w}",
    "blocks.{l}.ffn.experts.{w:gate=w1|up=w3|down=w2}": "layers.{l}.ffn.experts.{e}.{w}.weight",
    "blocks.{l}.ffn.{w:w1|w2|w3}": "layers.{l}.ffn.shared_experts.{w}.weight",
    "hc_head.{w:fn|base|scale}": ("hc_head_{w}", "hc_head.hc_{w}"),
    "norm": "norm.weight",
    "head": ("head.weight", "lm_head.weight"),
}
SKIPPED = {r"mtp\..*": "multi-token prediction drafts tokens; it is not part of the policy"}

FIXED: dict[str, Any] = {
    "num_key_value_heads": 1,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
"""Keys that this file knows with one value only; another value is refused."""

IGNORED = {
    "attention_dropout": "no dropout in RL",
    "initializer_range": "a checkpoint has its values",
    "mlp_bias": "no projection has a bias",
    "output_router_logits": "see Context.note",
    "pad_token_id": "packs have no padding",
    "partial_rotary_factor": "says qk_rope_head_dim / head_dim again",
    "router_aux_loss_coef": "a matter of the loss",
    "router_jitter_noise": "no noise in RL",
    "dspark_block_size": "draft heads are not the policy",
    "dspark_noise_token_id": "draft heads are not the policy",
    "dspark_target_layer_ids": "draft heads are not the policy",
    "dspark_markov_rank": "draft heads are not the policy",
}
YARN = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "o_groups": 2,
    "o_lora_rank": 128,
    "sliding_window": 16,
    "compress_ratios": (0, 0, 4, 128, 4, 128, 0),
    "index_n_heads": 16,
    "index_head_dim": 128,
    "index_topk": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "num_hash_layers": 3,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "original_max_position_embeddings": 256,
    },
    "max_position_embeddings": 4096,
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "expert_dtype": "fp8",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

KINDS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": OVERLAPPING,
    "heavily_compressed_attention": 128,
}


def from_transformers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The released keys from the normalised ones that transformers writes."""
    raw = dict(raw)
    rates = KINDS | (raw.pop("compress_rates", None) or {})
    kinds, mlps = raw.pop("layer_types"), raw.pop("mlp_layer_types", ())
    for key, found, known in (
        ("layer_types", kinds, KINDS),
        ("mlp_layer_types", mlps, ("hash_moe", "moe")),
    ):
        require(set(found) <= set(known), **{key: found}, known=list(known))
    raw["compress_ratios"] = [rates[kind] for kind in kinds]
    require(rates["compressed_sparse_attention"] == OVERLAPPING, compress_rates=rates)
    raw.setdefault("num_hash_layers", list(mlps).count("hash_moe"))
    require("hash_moe" not in mlps[raw["num_hash_layers"] :], mlp_layer_types=mlps)
    ropes = raw.pop("rope_parameters", None) or {}
    if "compress" in ropes:
        raw["rope_theta"], raw["compress_rope_theta"] = (
            float(ropes[k]["rope_theta"]) for k in ("main", "compress")
        )
        raw["rope_scaling"] = {
            key: ropes["compress"][key] for key in YARN if key in ropes["compress"]
        }
    raw.setdefault("qk_rope_head_dim", round(raw["head_dim"] * raw.get("partial_rotary_factor", 0)))
    return raw
