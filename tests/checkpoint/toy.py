"""A small architecture for tests of checkpoints, and a writer of its files that shares no code with the product."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from unified_models.model import LanguageModel
from unified_models.weight import Table, Weight

V, M, N, F, E, K = 24, 160, 130, 32, 4, 2  # 130 x 160: partial blocks at both edges


@dataclass(frozen=True)
class Config:
    num_layers: int = 2
    num_experts: int = E
    linear: str | None = None
    experts: str | None = None

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], source: str = "config.json") -> "Config":
        return cls(**{key: value for key, value in raw.items() if key != "model_type"})

    def to_json(self) -> dict[str, Any]:
        return {"model_type": "toy", **asdict(self)}

    @classmethod
    def tiny(cls, **overrides: Any) -> "Config":
        return cls(**overrides)


class Model(LanguageModel):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        self.config = cfg
        self.embed = Weight("vocab", V, None, M)
        self.blocks = nn.ModuleList(Block(cfg) for _ in range(cfg.num_layers))
        self.head = Weight("vocab", V, None, M)


class Block(nn.Module):
    def __init__(self, cfg: Config) -> None:
        super().__init__()
        count = cfg.num_experts
        self.norm = Weight(None, M)
        self.proj = Weight("heads", N, None, M, format=cfg.linear)
        self.bias = Weight(None, count, format="float32", frozen=True)
        self.fn = Weight(None, 3, None, M, format="float32")
        self.table = Table("vocab", V, None, K, upper=max(count, 384))
        self.gate = Weight("experts", count, None, F, None, M, format=cfg.experts)
        self.up = Weight("experts", count, None, F, None, M, format=cfg.experts)
        self.down = Weight("experts", count, None, M, None, F, format=cfg.experts)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64), persistent=False)


NAMES: dict[str, str | tuple[str, ...]] = {
    "embed": ("embed.weight", "embed_tokens.weight"),
    "blocks.{l}.{w:norm|proj}": "layers.{l}.{w}.weight",
    "blocks.{l}.{w:bias|table=tid2eid}": "layers.{l}.gate.{w}",
    "blocks.{l}.fn": ("layers.{l}.hc_fn", "layers.{l}.hc.fn"),
    "blocks.{l}.{w:gate=w1|up=w3|down=w2}": "layers.{l}.experts.{e}.{w}.weight",
    "head": "head.weight",
}
SKIPPED = {r"mtp\..*": "draft head"}


def codes(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """uint8 e4m3 codes without the two NaNs."""
    raw = torch.randint(0, 256, shape, generator=generator, dtype=torch.int32)
    return torch.where((raw & 0x7F) == 0x7F, raw - 1, raw).to(torch.uint8)


def positive_scales(shape: tuple[int, ...], largest: int, generator: torch.Generator) -> Tensor:
    """Random e4m3 scales above 0, up to the code `largest`, which one of them is."""
    raw = torch.randint(1, largest + 1, shape, generator=generator, dtype=torch.int32)
    raw.view(-1)[torch.randint(raw.numel(), (1,), generator=generator)] = largest
    return raw.to(torch.uint8).view(torch.float8_e4m3fn)


def is_scale(name: str) -> bool:
    """Whether a file's tensor is the scale of a weight."""
    return name.endswith((".scale", ".weight_scale", ".weight_scale_2"))


def modelopt(name: str, n: int, k: int, kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    """FP8 with one scale, or NVFP4 as one of its two rules leaves it (largest block scale 448 or 384)."""
    one = torch.rand((), generator=generator) / 1000 + 1e-4
    if kind == "fp8_tensor":
        return {
            f"{name}.weight": codes((n, k), generator).view(torch.float8_e4m3fn),
            f"{name}.weight_scale": one,
            f"{name}.input_scale": torch.rand((), generator=generator) / 100 + 1e-3,
        }
    pairs = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.int32)
    largest = 126 if kind == "nvfp4" else 124
    return {
        f"{name}.weight": pairs.to(torch.uint8),
        f"{name}.weight_scale": positive_scales((n, k // 16), largest, generator),
        f"{name}.weight_scale_2": one,
    }


def matrix(name: str, n: int, k: int, kind: str, generator: torch.Generator) -> dict[str, Tensor]:
    """`name`.weight and its scales, as files hold them."""
    if kind in ("fp8_tensor", "nvfp4", "nvfp4_four_over_six"):
        return modelopt(name, n, k, kind, generator)
    if kind in ("bfloat16", "float32", "float16"):
        values = torch.randn(n, k, generator=generator)
        return {f"{name}.weight": values.to(getattr(torch, kind))}
    if kind == "mxfp4":
        pairs = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.int32)
        scale = torch.randint(118, 126, (n, k // 32), generator=generator, dtype=torch.int32)
        weight = pairs.to(torch.uint8).view(torch.int8)
    else:
        shape = (-(-n // 128), -(-k // 128))
        weight = codes((n, k), generator).view(torch.float8_e4m3fn)
        if kind == "fp8_float32":
            scale = torch.rand(shape, generator=generator) / 1000 + 1e-4
            return {f"{name}.weight": weight, f"{name}.scale": scale}
        scale = torch.randint(110, 122, shape, generator=generator, dtype=torch.int32)
    return {
        f"{name}.weight": weight,
        f"{name}.scale": scale.to(torch.uint8).view(torch.float8_e8m0fnu),
    }


def tensors(
    linear: str = "bfloat16",
    experts: str = "bfloat16",
    seed: int = 0,
    layers: int = 2,
    count: int = E,
) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, random, in the given file formats."""
    g = torch.Generator().manual_seed(seed)
    out = matrix("embed", V, M, "bfloat16", g) | matrix("head", V, M, "bfloat16", g)
    for layer in range(layers):
        at = f"layers.{layer}"
        out[f"{at}.norm.weight"] = (1 + torch.randn(M, generator=g) / 5).bfloat16()
        out |= matrix(f"{at}.proj", N, M, linear, g)
        out[f"{at}.gate.bias"] = 6.82 + torch.rand(count, generator=g) * 0.24
        out[f"{at}.hc_fn"] = torch.randn(3, M, generator=g)
        out[f"{at}.gate.tid2eid"] = torch.randint(0, count, (V, K), generator=g)
        for e in range(count):
            for word, n, k in (("w1", F, M), ("w3", F, M), ("w2", M, F)):
                out |= matrix(f"{at}.experts.{e}.{word}", n, k, experts, g)
    return out


def write(
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    shards: int = 1,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint folder by the library's own writer; with an index when there are several shards."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "toy", **(config or {})}))
    if shards == 1:
        save_file(dict(state), folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    weight_map = {}
    names = list(state)
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({name: state[name] for name in part}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index of a folder."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def e4m3(code: int) -> float:
    """The value of an e4m3 byte, by its definition (OCP 8-bit floating point, table 1)."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if sign else value


def e2m1(code: int) -> float:
    """The value of a 4-bit code, by its definition (OCP microscaling v1.0, table 5)."""
    sign, exponent, mantissa = code >> 3 & 1, code >> 1 & 3, code & 1
    value = mantissa * 0.5 if exponent == 0 else (2 + mantissa) * 2.0 ** (exponent - 2)
    return -value if sign else value


def oracle(state: Mapping[str, Tensor], name: str) -> Tensor:
    """float64 values of matrix `name`, exact."""
    weight, scale = state[f"{name}.weight"], state.get(f"{name}.scale")
    raw = weight.view(torch.uint8)
    if f"{name}.weight_scale" in state and weight.dtype != torch.uint8:
        return each(raw, e4m3) * state[f"{name}.weight_scale"].double()
    if scale is None and weight.dtype != torch.uint8:
        return weight.double()
    if weight.dtype in (torch.int8, torch.uint8):
        values, rows, columns = each(torch.stack((raw & 15, raw >> 4), -1).flatten(-2), e2m1), 1, 32
    else:
        values, rows, columns = each(raw, e4m3), 128, 128
    if scale is None:
        blocks = each(state[f"{name}.weight_scale"].view(torch.uint8), e4m3)
        # a scale of NVFP4 is a float32 product
        scale, columns = (blocks * state[f"{name}.weight_scale_2"].double()).float(), 16
    if scale.dtype != torch.float32:
        scale = each(scale.view(torch.uint8), lambda b: 2.0 ** (b - 127))
    n, k = values.shape
    spread = scale.double()[torch.arange(n) // rows][:, torch.arange(k) // columns]
    return values * spread


def each(raw: Tensor, value: Callable[[int], float]) -> Tensor:
    """float64 `value` of each byte."""
    return torch.tensor([value(code) for code in range(256)], dtype=torch.float64)[raw.long()]
