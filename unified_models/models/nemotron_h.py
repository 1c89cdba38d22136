"""Nemotron-H, Nemotron-3 and 3.5 (arXiv 2504.03624; Nemotron 3 report, section 2): one mixer a layer - Mamba-2,
grouped-query attention without positions, experts, or a plain MLP.

T tokens  M model width  V vocabulary  H heads  P head dim of the scan  N state size  D head dim of attention
G groups (of the scan) or key heads  C convolved channels  E experts  K experts per token  F expert width
"""

import math
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
    Experts,
    Rows,
    State,
    StaticFP8,
    Weight,
    cache_scale,
)
from unified_models.model import LanguageModel
from unified_models.quantization import Quantization


@dataclass(frozen=True, kw_only=True)
class Config:
    """config.json as released; `from_json` also reads pattern strings and the form that transformers writes."""

    vocab_size: int  # V
    hidden_size: int  # M
    layers_block_type: tuple[str, ...]  # the mixer of each layer, a key of MIXERS
    num_attention_heads: int  # H
    num_key_value_heads: int  # G
    head_dim: int  # D
    mamba_num_heads: int  # H
    mamba_head_dim: int  # P
    ssm_state_size: int  # N
    n_groups: int  # G
    conv_kernel: int  # tokens that a convolution reads, itself included
    chunk_size: int  # tokens between the scan's states; part of the numerics
    layer_norm_epsilon: float
    max_position_embeddings: int  # tokens
    intermediate_size: int = 0  # of a plain MLP
    n_routed_experts: int = 0  # E
    num_experts_per_tok: int = 0  # K
    moe_intermediate_size: int = 0  # F
    moe_shared_expert_intermediate_size: int = 0
    moe_latent_size: int | None = None  # width of the experts, where it is not M
    routed_scaling_factor: float = 1.0
    time_step_limit: tuple[float, float] = (0.0, math.inf)  # after the softplus
    quantization_config: dict[str, Any] | None = None
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        small = {key: vars(self)[key] for key in SIZES if vars(self)[key] < 1}
        require(not small, **small)
        kinds = set(self.layers_block_type)
        require(kinds <= set(MIXERS), layers_block_type=sorted(kinds), known=list(MIXERS))
        H, G = self.num_attention_heads, self.num_key_value_heads
        require(H % G == 0, num_attention_heads=H, num_key_value_heads=G)
        H, G = self.mamba_num_heads, self.n_groups
        require(H % G == 0, mamba_num_heads=H, n_groups=G)
        require("mlp" not in kinds or self.intermediate_size > 0, intermediate_size=0)
        K, E = self.num_experts_per_tok, self.n_routed_experts
        if "moe" in kinds:
            widths = (self.moe_intermediate_size, self.moe_shared_expert_intermediate_size)
            require(0 < K <= E, num_experts_per_tok=K, n_routed_experts=E)
            require(min(widths) > 0, moe_and_shared_intermediate_size=widths)
        low, high = self.time_step_limit
        require(0 <= low < high, time_step_limit=self.time_step_limit)
        _ = self.quantization  # refuses what is not known

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], source: str = "config.json") -> "Config":
        """Read a config.json; ValueError names a key that is unknown, missing, contradictory or of another model."""
        return fields_from(cls, normalised(raw), fixed=FIXED, ignored=IGNORED, source=source)

    def to_json(self) -> dict[str, Any]:
        """The released form, which transformers and vLLM read."""
        given = {key: value for key, value in asdict(self).items() if value is not None}
        # infinity has no spelling in JSON that all readers know
        given["time_step_limit"] = [min(limit, HUGE) for limit in self.time_step_limit]
        if self.time_step_limit == (0.0, math.inf):
            del given["time_step_limit"]
        layers = len(self.layers_block_type)
        head = {"architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h"}
        return head | FIXED | given | {"num_hidden_layers": layers}

    @classmethod
    def tiny(cls, **overrides: Any) -> "Config":
        """Small numbers that keep every part."""
        return cls.from_json(TINY | overrides)

    @cached_property
    def quantization(self) -> Quantization:
        return Quantization.from_json(self.quantization_config, "config.json")


class Model(LanguageModel):
    """Embedding, one mixer a layer behind a norm, final norm; `logits` apart."""

    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config, self.eps = cfg, cfg.layer_norm_epsilon
        self.embed = Weight("vocab", cfg.vocab_size, None, cfg.hidden_size)
        self.blocks = nn.ModuleList(
            Block(cfg, layer) for layer in range(len(cfg.layers_block_type))
        )
        self.norm = Weight(None, cfg.hidden_size)
        head = cfg.quantization.stated("lm_head")
        self.head = Weight("vocab", cfg.vocab_size, None, cfg.hidden_size, format=head)

    def start(self, ids_T: Tensor, ctx: Context) -> Tensor:
        return ctx.embed(ids_T, self.embed)

    def finish(self, x_TM: Tensor, ctx: Context) -> Tensor:
        return ops.rms_norm(x_TM, self.norm().value, self.eps)

    def logits(self, hidden_TM: Tensor, ctx: Context) -> Tensor:
        return ctx.linear(hidden_TM, self.head, dtype=torch.float32)  # type: ignore[no-any-return]


class Block(nn.Module):
    """x + mixer(norm(x))."""

    def __init__(self, cfg: Config, layer: int) -> None:
        super().__init__()
        self.eps = cfg.layer_norm_epsilon
        self.norm = Weight(None, cfg.hidden_size)
        self.mixer = MIXERS[cfg.layers_block_type[layer]](cfg, f"layers.{layer}.mixer")

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        return x_TM + self.mixer(ops.rms_norm(x_TM, self.norm().value, self.eps), ctx)  # type: ignore[no-any-return]


class Mamba(nn.Module):
    """Mamba-2 (Dao and Gu 2024, section 7): projection, convolution, scan, gated norm, projection."""

    def __init__(self, cfg: Config, where: str) -> None:
        super().__init__()
        H, P, N, G = cfg.mamba_num_heads, cfg.mamba_head_dim, cfg.ssm_state_size, cfg.n_groups
        M, I, C = cfg.hidden_size, H * P, H * P + 2 * G * N
        self.eps, self.limit, self.P, self.N, self.G = (
            cfg.layer_norm_epsilon,
            cfg.time_step_limit,
            P,
            N,
            G,
        )
        self.projected, self.convolved = (I, C, H), (I, G * N, G * N)
        stated = cfg.quantization.stated
        self.in_proj = Weight(None, I + C + H, None, M, format=stated(f"{where}.in_proj"))
        self.conv = Weight(None, C, None, 1, None, cfg.conv_kernel)
        self.conv_bias = Weight(None, C, init="bias")
        self.dt_bias = Weight("heads", H, format="float32", init="dt_bias")
        self.A_log = Weight("heads", H, format="float32", init="A_log")
        self.D = Weight("heads", H, format="float32")
        self.norm = Weight("heads", I)
        self.out_proj = Weight(None, M, "heads", I, format=stated(f"{where}.out_proj"))
        self.recent = Rows(C, keep=cfg.conv_kernel, record=BFLOAT16_RECORD)
        self.state = State((H, P, N), groups=G, chunk=cfg.chunk_size, record=BFLOAT16_RECORD)

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        z_TI, xbc_TC, dt_TH = ctx.linear(x_TM, self.in_proj).split(self.projected, -1)
        convolved_TC = ctx.conv(xbc_TC, self.conv, self.conv_bias, self.recent)
        x_TI, b_TJ, c_TJ = ops.silu(convolved_TC, xbc_TC.dtype).split(self.convolved, -1)
        y_THP = ctx.scan(
            x_TI.unflatten(-1, (-1, self.P)),
            ops.time_step(dt_TH, self.dt_bias().value, self.limit),
            b_TJ.unflatten(-1, (-1, self.N)),
            c_TJ.unflatten(-1, (-1, self.N)),
            self.state,
            a_H=ops.decay_rates(self.A_log()),
            skip_H=self.D().value,
        )
        y_TI = ops.gated_norm(y_THP.flatten(1), z_TI, self.norm().value, self.eps, groups=self.G)
        return ctx.linear(y_TI, self.out_proj)  # type: ignore[no-any-return]


class Attention(nn.Module):
    """Grouped-query attention over everything so far; the scans know the order, so it has no positions."""

    def __init__(self, cfg: Config, where: str) -> None:
        super().__init__()
        H, G, D, M = cfg.num_attention_heads, cfg.num_key_value_heads, cfg.head_dim, cfg.hidden_size
        self.D, stated = D, cfg.quantization.stated
        self.q_proj = Weight("heads", H * D, None, M, format=stated(f"{where}.q_proj"))
        self.k_proj = Weight("heads", G * D, None, M, format=stated(f"{where}.k_proj"))
        self.v_proj = Weight("heads", G * D, None, M, format=stated(f"{where}.v_proj"))
        self.o_proj = Weight(None, M, "heads", H * D, format=stated(f"{where}.o_proj"))
        quantized = cfg.quantization.kv_cache == "FP8"
        self.keys_values = Rows(2 * G * D, record=StaticFP8() if quantized else BFLOAT16_RECORD)
        self.k_scale = cache_scale() if quantized else None
        self.v_scale = cache_scale() if quantized else None

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        q, k, v = ctx.linear(x_TM, self.q_proj, self.k_proj, self.v_proj)
        q_THD, k_TGD, v_TGD = (rows.unflatten(-1, (-1, self.D)) for rows in (q, k, v))
        scales = (self.k_scale, self.v_scale) if self.k_scale and self.v_scale else None
        o_THD = ctx.attend(q_THD, k_TGD, v_TGD, self.keys_values, scale=self.D**-0.5, scales=scales)
        return ctx.linear(o_THD.flatten(1), self.o_proj)  # type: ignore[no-any-return]


class MLP(nn.Module):
    """down(max(up x, 0)^2)."""

    def __init__(self, cfg: Config, where: str, width: int | None = None) -> None:
        super().__init__()
        M, F, stated = cfg.hidden_size, width or cfg.intermediate_size, cfg.quantization.stated
        self.up_proj = Weight(None, F, None, M, format=stated(f"{where}.up_proj"))
        self.down_proj = Weight(None, M, None, F, format=stated(f"{where}.down_proj"))

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        return ctx.linear(ops.relu2(ctx.linear(x_TM, self.up_proj)), self.down_proj)  # type: ignore[no-any-return]


class MoE(nn.Module):
    """Routed experts, in a narrower space where there is a latent size, and one shared expert."""

    def __init__(self, cfg: Config, where: str) -> None:
        super().__init__()
        M, F, E = cfg.hidden_size, cfg.moe_intermediate_size, cfg.n_routed_experts
        self.K, self.scaling, stated = (
            cfg.num_experts_per_tok,
            cfg.routed_scaling_factor,
            cfg.quantization.stated,
        )
        self.gate = Weight(None, E, None, M)
        self.bias = Weight(None, E, format="float32", frozen=True, init="score_bias")
        L = cfg.moe_latent_size
        if L is None:
            self.fc1_latent_proj = self.fc2_latent_proj = None
        else:
            self.fc1_latent_proj = Weight(
                None, L, None, M, format=stated(f"{where}.fc1_latent_proj")
            )
            self.fc2_latent_proj = Weight(
                None, M, None, L, format=stated(f"{where}.fc2_latent_proj")
            )
        formats = {name: of_experts(cfg, where, name) for name in ("up", "down")}
        self.experts = Experts(E, L or M, F, activation="relu2", formats=formats)
        width = cfg.moe_shared_expert_intermediate_size
        self.shared_experts = MLP(cfg, f"{where}.shared_experts", width)

    def forward(self, x_TM: Tensor, ctx: Context) -> Tensor:
        scores_TE = ops.sigmoid(ctx.linear(x_TM, self.gate, dtype=torch.float32))
        ids_TK = ctx.choose(
            scores_TE + self.bias().value, self.K, self
        )  # the bias chooses, and weighs nothing
        gates_TK = ops.route_weights(scores_TE, ids_TK, self.scaling)
        routed_TL = ctx.linear(x_TM, self.fc1_latent_proj) if self.fc1_latent_proj else x_TM
        routed_TL = ctx.moe(routed_TL, ids_TK, gates_TK, self.experts)
        routed_TM = (
            ctx.linear(routed_TL, self.fc2_latent_proj) if self.fc2_latent_proj else routed_TL
        )
        return routed_TM + self.shared_experts(x_TM, ctx)  # type: ignore[no-any-return]


def of_experts(cfg: Config, where: str, name: str) -> str | None:
    """The format of one matrix of every expert; ValueError where they differ, since they lie in one stack."""
    stated = cfg.quantization.stated
    modules = [f"{where}.experts.{e}.{name}_proj" for e in range(cfg.n_routed_experts)]
    for module in modules:
        same = stated(module) == stated(modules[0])
        require(same, **{modules[0]: stated(modules[0]), module: stated(module)})
    return stated(modules[0])


MIXERS: dict[str, type[nn.Module]] = {
    "mamba": Mamba,
    "attention": Attention,
    "moe": MoE,
    "mlp": MLP,
}
LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
SPELLINGS = {"linear_attention": "mamba", "full_attention": "attention"}  # as transformers writes
RENAMED = {
    "norm_eps": "layer_norm_epsilon",
    "rms_norm_eps": "layer_norm_epsilon",
    "attention_head_dim": "head_dim",
}
"""Keys of other releases -> their name here."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "mamba_num_heads",
    "mamba_head_dim",
    "ssm_state_size",
    "n_groups",
    "conv_kernel",
    "chunk_size",
    "max_position_embeddings",
)
"""Keys that are at least 1."""
HUGE = 1e308


def normalised(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the newest release: a list of layers for a pattern string, plain numbers for time limits."""
    raw = dict(raw)
    for old, new in RENAMED.items():
        value = raw.pop(old, None)
        if value is not None and raw.get(new) is None:
            raw[new] = value
        require(value is None or raw[new] == value, **{old: value, new: raw.get(new)})
    pattern, layers = raw.pop("hybrid_override_pattern", None), raw.get("layers_block_type")
    if layers is not None:
        require(isinstance(layers, list | tuple), layers_block_type=layers)
        raw["layers_block_type"] = [SPELLINGS.get(str(kind), kind) for kind in layers]
    if pattern is not None:
        letters = sorted(set(str(pattern)) - set(LETTERS))
        require(not letters, hybrid_override_pattern=pattern, unknown=letters, known=list(LETTERS))
        kinds = [LETTERS[letter] for letter in pattern]
        same = layers is None or raw["layers_block_type"] == kinds
        require(same, hybrid_override_pattern=pattern, layers_block_type=layers)
        raw["layers_block_type"] = kinds
    count, given = raw.pop("num_hidden_layers", None), raw.get("layers_block_type")
    if count is not None and given is not None:
        require(count == len(given), num_hidden_layers=count, layers_given=len(given))
    limits = raw.get("time_step_limit")
    if limits is not None:
        require(isinstance(limits, list | tuple), time_step_limit=limits)
        raw["time_step_limit"] = [number(limit) for limit in limits]
    return {key: value for key, value in raw.items() if value is not None or key in FIXED}


def number(limit: Any) -> Any:
    """A time limit as exporters spell it: a number, or what transformers writes for infinity."""
    if limit == {"__float__": "Infinity"}:
        return math.inf
    return math.inf if isinstance(limit, int | float) and limit >= 1e300 else limit


def spelled(*names: str) -> tuple[str, ...]:
    """Tensor names as released, and without their prefix."""
    return tuple(f"backbone.{name}" for name in names) + names


NAMES: dict[str, str | tuple[str, ...]] = {
    "embed": spelled("embeddings.weight", "embedding.weight", "embed_tokens.weight"),
    "blocks.{l}.norm": spelled("layers.{l}.norm.weight"),
    "blocks.{l}.mixer.{w:in_proj|conv=conv1d|norm|out_proj|q_proj|k_proj|v_proj|o_proj|gate|up_proj|down_proj"
    "|fc1_latent_proj|fc2_latent_proj}": spelled("layers.{l}.mixer.{w}.weight"),
    "blocks.{l}.mixer.conv_bias": spelled("layers.{l}.mixer.conv1d.bias"),
    "blocks.{l}.mixer.{w:A_log|D|dt_bias}": spelled("layers.{l}.mixer.{w}"),
    "blocks.{l}.mixer.k_scale": spelled("layers.{l}.mixer.k_proj.k_scale"),
    "blocks.{l}.mixer.v_scale": spelled("layers.{l}.mixer.v_proj.v_scale"),
    "blocks.{l}.mixer.bias": spelled("layers.{l}.mixer.gate.e_score_correction_bias"),
    "blocks.{l}.mixer.experts.{w:up|down}": spelled("layers.{l}.mixer.experts.{e}.{w}_proj.weight"),
    "blocks.{l}.mixer.shared_experts.{w:up_proj|down_proj}": spelled(
        "layers.{l}.mixer.shared_experts.{w}.weight"
    ),
    "norm": spelled("norm_f.weight"),
    "head": "lm_head.weight",
}
SKIPPED = {r"mtp\..*": "multi-token prediction drafts tokens; it is not part of the policy"}

FIXED: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "mamba_proj_bias": False,
    "use_conv_bias": True,
    "mamba_hidden_act": "silu",
    "mlp_hidden_act": "relu2",
    "mamba_ssm_cache_dtype": "float32",
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "residual_in_fp32": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
"""Keys that this file knows with one value only; another value is refused."""

IGNORED = {
    "attention_dropout": "no dropout in RL",
    "hidden_dropout": "no dropout in RL",
    "expand": "the scan's width is mamba_num_heads * mamba_head_dim",
    "initializer_range": "a checkpoint has its values",
    "rescale_prenorm_residual": "a matter of initialisation",
    "time_step_floor": "a matter of initialisation",
    "time_step_max": "a matter of initialisation",
    "time_step_min": "a matter of initialisation",
    "time_step_rank": "the time step has one value a head",
    "partial_rotary_factor": "attention has no positions",
    "rope_theta": "attention has no positions",
    "pad_token_id": "packs have no padding",
    "num_logits_to_keep": "a matter of the caller",
    "use_mamba_kernels": "a matter of the backend",
    "moe_shared_expert_overlap": "a matter of the backend",
    "output_router_logits": "see Context.note",
    "num_nextn_predict_layers": "draft heads are not the policy",
    "mtp_layers_block_type": "draft heads are not the policy",
    "mtp_hybrid_override_pattern": "draft heads are not the policy",
}

TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "layers_block_type": ["mamba", "moe", "mamba", "attention", "moe", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 32,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 4096,
    "intermediate_size": 192,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 80,
    "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 2.5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
