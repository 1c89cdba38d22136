"""Random checkpoints from a config.json: what is offered is what `make_tiny` writes, and loads as that does."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import unified_models as um
from unified_models import tiny
from unified_models.adapters.vllm import full
from unified_models.arguments import assignments
from unified_models.checkpoint.loading import build
from unified_models.checkpoint.names import Names
from unified_models.checkpoint.shards import open_shards
from unified_models.formats.fp4 import E2M1
from unified_models.model import LanguageModel
from unified_models.weight import Weight

CONFIGS = Path(__file__).parents[3] / "configs"
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v4_bfloat16": ("deepseek_v4", {"quantization_config": None, "expert_dtype": None}),
    "deepseek_v4_fp8": ("deepseek_v4", {}),
    "deepseek_v4_mxfp4": ("deepseek_v4", {"expert_dtype": "fp4"}),
    "deepseek_v4_float32_scales": ("deepseek_v4", {"quantization_config": BLOCKS}),
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h_mixed": ("nemotron_h", {"config": CONFIGS / "tiny/nemotron_h_mixed.json"}),
    "qwen3": ("qwen3", {}),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def random(vllm: str) -> Any:
    """The module under test, which registers a loader in vLLM."""
    from unified_models.adapters.vllm import random

    return random


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of each case, what `make_tiny` writes."""
    made = {name: tmp_path_factory.mktemp("random") / name for name in CASES}
    for name, (architecture, options) in CASES.items():
        um.make_tiny(architecture, made[name], **options)
    return made


def loaded(random: Any, folder: Path, seed: int = 0) -> LanguageModel:
    """As vLLM's class of ours loads it: packed bytes alone."""
    from unified_models.adapters.vllm.weights import load

    with torch.device("meta"):
        model = build(folder)
    load(model, random.RandomShards(folder, CPU, seed), "deployed", False, CPU)
    return model


def same(a: Tensor, b: Tensor) -> bool:
    """Of dtype, shape and every byte; nothing compared is not the same."""
    alike = (a.dtype, a.shape) == (b.dtype, b.shape) and a.numel() > 0
    return alike and torch.equal(
        *(t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)),
    )


@pytest.mark.parametrize("name", CASES)
def test_offers_the_tensors_of_a_file(random: Any, folders: dict[str, Path], name: str) -> None:
    def told(shards: Any) -> dict[str, tuple[Any, ...]]:
        return {n: (t.name, t.dtype, t.shape, t.size) for n, t in shards.tensors.items()}

    shards = random.RandomShards(folders[name], CPU)
    assert told(shards) == told(open_shards(folders[name]))
    for tensor in shards.tensors.values():
        values = shards.read(tensor.name)
        assert (tuple(values.shape), values.nbytes) == (tensor.shape, tensor.size)
        assert random.DTYPE_NAMES[values.dtype] == tensor.dtype


@pytest.mark.parametrize("name", CASES)
def test_readings_are_the_same_in_any_order(
    random: Any, folders: dict[str, Path], name: str
) -> None:
    shards, again = (random.RandomShards(folders[name], CPU) for _ in range(2))
    other = random.RandomShards(folders[name], CPU, seed=1)
    first = {tensor: shards.read(tensor).clone() for tensor in shards.tensors}
    for tensor in reversed(first):
        assert same(again.read(tensor), first[tensor]), tensor
    quantized = {n for n in first if n.endswith("weight")}
    changed = {n for n in quantized if not same(other.read(n), first[n])}
    assert changed == quantized, "another seed, other values"


@pytest.mark.parametrize("name", CASES)
def test_loads_strictly_with_the_wanted_size(
    random: Any, folders: dict[str, Path], name: str
) -> None:
    model = loaded(random, folders[name])
    formats = {path: weight.stored.name for path, weight in um.load(folders[name]).weights()}
    assert formats == {path: weight.stored.name for path, weight in model.weights()}
    for path, weight in model.weights():
        values, kind = weight().dequantized(), random.kind_of(weight)
        center, size = random.SIZES[kind]
        size = size or (3 if kind == "vocab" else 1) / math.sqrt(weight.shape[-1])
        few = 6 / math.sqrt(values.numel())
        assert abs(values.mean() - center) <= few * size, path
        if values.numel() > 1:
            assert abs(values.std() / size - 1) <= few + 0.03, path
    for path, table in model.tables():
        rows = table.data.sort(dim=1).values
        assert (rows.diff(dim=1) > 0).all() and rows.min() >= 0, path
        assert table.upper is not None and rows.max() < table.upper, path
        assert len(rows.unique(dim=0)) > 1, path


@pytest.mark.parametrize(("architecture", "count"), [("deepseek_v4", 3), ("nemotron_h", 2)])
def test_a_routers_bias_is_small(random: Any, architecture: str, count: int) -> None:
    with torch.device("meta"):
        model = um.registry.find(architecture).Model(um.registry.find(architecture).Config.tiny())
    kinds = {path: random.kind_of(weight) for path, weight in model.weights()}
    small = [path for path, kind in kinds.items() if kind == "score_bias"]
    assert len(small) == count and all(path.endswith(("ffn.bias", "mixer.bias")) for path in small)
    assert {"bias", "norm", "matrix", "vocab"} <= set(kinds.values())


def test_every_kind_has_the_size_of_a_tiny_one(random: Any) -> None:
    assert random.SIZES.keys() == tiny.INITS.keys()
    shape = torch.Size((400, 256))
    for kind, (center, size) in random.SIZES.items():
        values = tiny.INITS[kind](shape, torch.Generator().manual_seed(0))
        size = size or (3 if kind == "vocab" else 1) / 16
        assert abs(values.mean() - center) < size / 50, kind
        assert abs(values.std() / size - 1) < 0.02, kind


def decoded(shards: Any, base: str) -> Tensor:
    """float64 values of a quantised matrix, by the definition of its format."""
    codes = shards.read(f"{base}.weight")
    beside = {n.removeprefix(f"{base}."): shards.read(n) for n in shards.tensors if base in n}
    scale = beside["scale" if "scale" in beside else "weight_scale"].double()
    if codes.dtype == torch.float8_e4m3fn:
        values = codes.double()
    else:
        table = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
        pairs = codes.view(torch.uint8).int()
        values = table[torch.stack((pairs % 16, pairs // 16), -1).flatten(-2)]
    for dim in range(scale.ndim):
        scale = scale.repeat_interleave(-(-values.shape[dim] // scale.shape[dim]), dim)
    if scale.ndim:
        scale = scale[: values.shape[0], : values.shape[1]]
    scale = scale * beside.get("weight_scale_2", torch.ones(())).double()
    decoded_NK: Tensor = values * scale
    return decoded_NK


@pytest.mark.parametrize(
    ("name", "base", "path", "index"),
    [
        ("deepseek_v4_fp8", "layers.2.ffn.experts.3.w2", "blocks.2.ffn.experts.down", 3),
        ("deepseek_v4_fp8", "layers.0.attn.wo_a", "blocks.0.attention.wo_a", None),
        ("deepseek_v4_mxfp4", "layers.2.ffn.experts.3.w1", "blocks.2.ffn.experts.gate", 3),
        ("deepseek_v4_float32_scales", "layers.1.attn.wq_b", "blocks.1.attention.wq_b", None),
        ("nemotron_h_mixed", "backbone.layers.0.mixer.in_proj", "blocks.0.mixer.in_proj", None),
        (
            "nemotron_h_mixed",
            "backbone.layers.1.mixer.experts.7.down_proj",
            "blocks.1.mixer.experts.down",
            7,
        ),
        ("nemotron_h_mixed", "lm_head", "head", None),
    ],
)
def test_codes_and_scales_stand_for_the_drawn_values(
    random: Any, folders: dict[str, Path], name: str, base: str, path: str, index: int | None
) -> None:
    """Decoded by hand: near the master, and what our class computes with. Control: another matrix's scales."""
    shards = random.RandomShards(folders[name], CPU)
    values = decoded(shards, base)
    (part,) = [p for p in Names.of(build(folders[name])).parts if p.name == f"{base}.weight"]
    assert isinstance(part.owner, Weight)
    master = shards._master(part.owner, part).double()
    four = shards.tensors[f"{base}.weight"].dtype in ("I8", "U8")
    error = (values - master).norm() / master.norm()
    assert 0.001 < error < (0.16 if four else 0.04)
    held = dict(loaded(random, folders[name]).weights())[path]().dequantized()
    held = held if index is None else held[index]
    apart = (held.double() - values).abs().max() / values.abs().max()
    assert held.shape == values.shape and apart < 1e-6
    assert (values.flip(0) - master).norm() / master.norm() > 1


def test_others_read_scales_beside_fp8_experts_as_numbers(
    random: Any, folders: dict[str, Path]
) -> None:
    """Other tensors, and all beside four-bit experts, come as the file has them."""
    for name, wide in (("deepseek_v4_fp8", True), ("deepseek_v4_mxfp4", False)):
        shards = random.RandomShards(folders[name], CPU)
        given = dict(random.for_others(shards))
        assert given.keys() == shards.tensors.keys()
        widened = {n for n, t in given.items() if not same(t, shards.read(n))}
        scales = {n for n in given if n.endswith(".scale")}
        assert len(scales) > 6 * 8 * 3 and widened == (scales if wide else set())
        for tensor in widened:
            values, exponents = given[tensor], shards.read(tensor).view(torch.uint8).double()
            assert values.dtype == torch.float32
            assert torch.equal(values.double(), torch.exp2(exponents - 127))


def test_configs_of_full_width(random: Any, tmp_path: Path) -> None:
    """The six layers that run on one GPU: keys as typed, names and shapes as released; nothing is read."""
    typed = "num_hidden_layers=6 compress_ratios=[0,4,128,4,128,4] num_hash_layers=1 num_nextn_predict_layers=0"
    found = {}
    for dtype in ("fp8", "fp4"):
        changes = dict(assignments([*typed.split(), f"expert_dtype={dtype}"]))
        folder = tmp_path / dtype
        folder.mkdir()
        full.write_config(CONFIGS / "deepseek_v4_flash.json", changes, folder)
        with torch.device("meta"):
            config = build(folder).config
        assert config.compress_ratios == (0, 4, 128, 4, 128, 4) and config.num_hash_layers == 1
        assert config.quantization_config["quant_method"] == "fp8"
        tensors = random.RandomShards(folder, CPU).tensors
        found[dtype] = {name: (t.dtype, t.shape) for name, t in tensors.items()}
    eight, four = found["fp8"], found["fp4"]
    assert eight.keys() == four.keys()
    assert eight["layers.0.ffn.gate.tid2eid"] == ("I64", (129280, 6))
    assert [n for n in eight if "tid2eid" in n] == ["layers.0.ffn.gate.tid2eid"]
    assert eight["layers.5.attn.wo_a.weight"] == ("F8_E4M3", (8192, 4096))
    assert eight["layers.5.attn.wo_a.scale"] == ("F8_E8M0", (64, 32))
    assert eight["layers.5.ffn.experts.255.w1.weight"] == ("F8_E4M3", (2048, 4096))
    assert eight["layers.5.ffn.experts.255.w1.scale"] == ("F8_E8M0", (16, 32))
    assert four["layers.5.ffn.experts.255.w1.weight"] == ("I8", (2048, 2048))
    assert four["layers.5.ffn.experts.255.w1.scale"] == ("F8_E8M0", (2048, 128))
    assert not any(name.startswith("mtp.") for name in eight)


@pytest.mark.parametrize("name", [p.stem for p in sorted(CONFIGS.glob("*.json"))])
def test_write_config_keeps_what_the_architecture_reads(tmp_path: Path, name: str) -> None:
    full.write_config(CONFIGS / f"{name}.json", {}, tmp_path)
    before, after = (
        json.loads(file.read_text())
        for file in (CONFIGS / f"{name}.json", tmp_path / "config.json")
    )
    assert {**after, "auto_map": before.get("auto_map")} == {"auto_map": None, **before}
    with torch.device("meta"):
        assert build(tmp_path).config.vocab_size == before["vocab_size"]


class Ours:
    """What `replace_all` asks of our class in vLLM."""

    def __init__(self, model: LanguageModel) -> None:
        self.model, self.calls, self.missing = model, 0, set[str]()

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        from unified_models.adapters.vllm.weights import load, still_missing

        given = load(self.model, weights, "deployed", True, CPU)
        self.missing, self.calls = still_missing(self.model, self.missing, given), self.calls + 1


def held(model: LanguageModel) -> Iterator[tuple[str, Any]]:
    """(path, copies of packed bytes or of a table)."""
    for path, weight in model.weights():
        yield path, [tensor.clone() for tensor in weight().packed.values()]
    for path, table in model.tables():
        yield path, [table.data.clone()]


@pytest.mark.parametrize("name", CASES)
def test_an_update_is_whole_and_leaves_norms_alone(
    random: Any, folders: dict[str, Path], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full, "SENT", 1 << 17)
    model = loaded(random, folders[name])
    before, values = (
        dict(held(model)),
        {p: w().dequantized().clone() for p, w in model.weights()},
    )
    ours = Ours(model)
    full.replace_all(ours)
    assert not ours.missing and ours.calls > 3
    moved = {
        path
        for path, tensors in held(model)
        if not all(same(*pair) for pair in zip(tensors, before[path], strict=True))
    }
    matrices = {
        path
        for path, weight in model.weights()
        if len(weight.shape) > 1 and not weight.frozen and not path.endswith("ape")
    }
    assert moved == matrices and moved != before.keys()
    for path, weight in model.weights():
        if path in moved:
            apart = (weight().dequantized() - values[path]).norm() / values[path].norm()
            assert 0.005 < apart < 0.1, path


def test_vllms_own_class_gets_the_cache_it_needs(
    vllm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import vllm as engine

    given: list[dict[str, Any]] = []
    monkeypatch.setattr(engine, "LLM", lambda folder, **options: given.append(options))
    for name in ("deepseek_v4_flash", "nemotron_3_nano_30b"):
        full.write_config(CONFIGS / f"{name}.json", {}, tmp_path)
        for ours in (True, False):
            full.start(tmp_path, full.Load(), ours=ours)
    caches = [SimpleNamespace(**{"kv_cache_dtype": None, **o}).kv_cache_dtype for o in given]
    assert caches == [None, "fp8", None, None]
    assert {options["load_format"] for options in given} == {"unified_random"}
