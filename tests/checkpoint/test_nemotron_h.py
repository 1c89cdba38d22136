"""Nemotron-H's checkpoints: official names and bytes both ways, in every format that was released."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import unified_models as um
from unified_models import checkpoint

FP8 = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
NVFP4 = {"quant_algo": "NVFP4", "ignore": ["lm_head", "*.q_proj", "backbone.layers.2.mixer"]}
FOUR_OVER_SIX = {"quant_algo": "W4A16_NVFP4", "four_over_six": True}
FLOAT32 = {"A_log", "D", "dt_bias", "e_score_correction_bias", "k_scale", "v_scale", "input_scale"}
FLOAT32 |= {"weight_scale", "weight_scale_2"}
IDS = [[5, 511, 0, 77, 3, 3, 260, 19, 44, 501, 7, 7, 130, 12, 99, 4, 311, 257, 2, 1]]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def said_by(folder: Path) -> dict[str, str]:
    """What `inspect` decides about each tensor."""
    return {line.name: line.decision for line in checkpoint.describe(folder).lines}


def test_official_names_shapes_and_dtypes_A33(nemotrons: Any) -> None:
    """As released, one projection into each expert and not two."""
    found = load_file(nemotrons() / "model.safetensors")
    u8, f8, f32, bf16 = torch.uint8, torch.float8_e4m3fn, torch.float32, torch.bfloat16
    at = "backbone.layers"
    for name, dtype, shape in (
        ("backbone.embeddings.weight", bf16, (512, 128)),
        ("backbone.norm_f.weight", bf16, (128,)),
        ("lm_head.weight", u8, (512, 64)),
        ("lm_head.weight_scale", f8, (512, 8)),
        ("lm_head.weight_scale_2", f32, ()),
        (f"{at}.0.norm.weight", bf16, (128,)),
        (f"{at}.0.mixer.in_proj.weight", f8, (392, 128)),
        (f"{at}.0.mixer.in_proj.weight_scale", f32, ()),
        (f"{at}.0.mixer.in_proj.input_scale", f32, ()),
        (f"{at}.2.mixer.out_proj.weight", f8, (128, 128)),
        (f"{at}.0.mixer.conv1d.weight", bf16, (256, 1, 4)),
        (f"{at}.0.mixer.conv1d.bias", bf16, (256,)),
        (f"{at}.0.mixer.A_log", f32, (8,)),
        (f"{at}.0.mixer.D", f32, (8,)),
        (f"{at}.0.mixer.dt_bias", f32, (8,)),
        (f"{at}.0.mixer.norm.weight", bf16, (128,)),
        (f"{at}.1.mixer.gate.weight", bf16, (8, 128)),
        (f"{at}.1.mixer.gate.e_score_correction_bias", f32, (8,)),
        (f"{at}.1.mixer.experts.7.up_proj.weight", u8, (80, 64)),
        (f"{at}.1.mixer.experts.7.up_proj.weight_scale", f8, (80, 8)),
        (f"{at}.1.mixer.experts.7.down_proj.weight", u8, (128, 40)),
        (f"{at}.1.mixer.experts.7.down_proj.weight_scale_2", f32, ()),
        (f"{at}.4.mixer.shared_experts.up_proj.weight", u8, (96, 64)),
        (f"{at}.3.mixer.q_proj.weight", bf16, (128, 128)),
        (f"{at}.3.mixer.k_proj.weight", bf16, (64, 128)),
        (f"{at}.3.mixer.k_proj.k_scale", f32, ()),
        (f"{at}.5.mixer.v_proj.v_scale", f32, ()),
        (f"{at}.3.mixer.o_proj.weight", bf16, (128, 128)),
    ):
        assert (found[name].dtype, tuple(found[name].shape)) == (dtype, shape), name
    experts = {n.removeprefix(f"{at}.1.mixer.experts.") for n in found if ".1.mixer.experts" in n}
    ends = ("weight", "weight_scale", "weight_scale_2")
    assert experts == {f"{e}.{w}_proj.{x}" for e in range(8) for w in ("up", "down") for x in ends}
    assert len([name for name in found if name.endswith("input_scale")]) == 4
    assert um.load(nemotrons()).blocks[1].mixer.experts.gate is None


@pytest.mark.parametrize("said", ["mixed", FP8, NVFP4, FOUR_OVER_SIX, None], ids=str)
def test_every_release_keeps_its_bytes(nemotrons: Any, tmp_path: Path, said: Any) -> None:
    folder = nemotrons(said)
    model = um.load(folder)
    assert model.load_report.changed == () and model.load_report.notes == ()
    um.save(model, tmp_path / "one", max_shard_bytes=100_000)
    assert len(list((tmp_path / "one").glob("*.safetensors"))) > 2
    um.save(um.load(tmp_path / "one"), tmp_path / "two")
    um.save(um.load(folder, weights="file"), tmp_path / "three")
    um.save(um.load(folder, numerics="float32"), tmp_path / "four")
    for name in ("two", "three", "four"):
        assert files(tmp_path / name) == files(folder)
    assert ("hf_quant_config.json" in files(folder)) == (said is not None)
    kinds = {weight.format.name for _, weight in model.weights()} - {"float32", "bfloat16"}
    assert (
        kinds
        == {
            "mixed": {"fp8_tensor", "nvfp4"},
            "FP8": {"fp8_tensor"},
            "NVFP4": {"nvfp4"},
            "W4A16_NVFP4": {"nvfp4_four_over_six"},
            None: set(),
        }[said["quant_algo"] if isinstance(said, dict) else said]
    )
    report = checkpoint.describe(folder)
    assert report.problems == () and report.notes == () and report.changed == ()
    assert "unused" not in said_by(folder).values()


@pytest.mark.parametrize("said", ["mixed", FP8, NVFP4, FOUR_OVER_SIX], ids=str)
def test_every_tensor_equals_the_file_D14(nemotrons: Any, toy_file: Any, said: Any) -> None:
    """Nothing ran after the load that changed one: neither an initialiser, nor a rounding."""
    state = load_file(nemotrons(said) / "model.safetensors")
    model = um.load(nemotrons(said))
    found = dict(um.named_tensors(model))
    assert set(found) == {name for name in state if not toy_file.is_scale(name)}
    quantised = 0
    for name, values in found.items():
        base = name.removesuffix(".weight")
        expected = state[name]
        if state[name].dtype in (torch.uint8, torch.float8_e4m3fn):
            expected = toy_file.oracle(state, base).float().bfloat16()
            quantised += 1
        assert torch.equal(values, expected.float()), name
    assert quantised >= 10
    packed = um.load(nemotrons(said), weights="file")
    for name, values in um.named_tensors(packed):
        if state[name].dtype in (torch.uint8, torch.float8_e4m3fn):
            assert torch.equal(values, toy_file.oracle(state, name.removesuffix(".weight")).float())


def test_float32_parameters_stay_float32_D03(nemotrons: Any, tmp_path: Path) -> None:
    """Through a load, a cast of the whole model, a save and a load; a bfloat16 step would show: 1 and 1 + 2^-10."""
    model = um.load(nemotrons())
    for name in ("A_log", "D", "dt_bias"):
        weight = getattr(model.blocks[0].mixer, name)
        weight.assign(1 + torch.arange(8) * 2.0**-10)
    model.bfloat16()
    model.commit()
    um.save(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    again = um.load(tmp_path / "saved")
    for name in ("A_log", "D", "dt_bias"):
        assert torch.equal(saved[f"backbone.layers.0.mixer.{name}"], 1 + torch.arange(8) * 2.0**-10)
        weight = getattr(again.blocks[0].mixer, name)
        assert torch.equal(weight().value, 1 + torch.arange(8) * 2.0**-10)
    wide = {name for name, tensor in saved.items() if tensor.dtype == torch.float32}
    assert {name.rsplit(".", 1)[1] for name in wide} == FLOAT32 and len(wide) > 50
    assert again.load_report.widened == ()


def test_a_16_bit_file_of_a_float32_parameter_is_told_D03(changed: Any) -> None:
    names = [f"backbone.layers.{n}.mixer.{w}" for n in (0, 2) for w in ("dt_bias", "A_log", "D")]

    def narrow(state: dict[str, Tensor]) -> None:
        state.update({name: state[name].bfloat16() for name in names})

    model = um.load(changed(narrow))
    assert set(model.load_report.widened) == set(names)
    assert "float32 parameter stored in 16 bits: backbone.layers.2.mixer.D" in str(
        model.load_report
    )
    assert model.blocks[2].mixer.D.master.dtype == torch.float32


@pytest.mark.parametrize("embedding", ["embeddings", "embedding", "embed_tokens"])
@pytest.mark.parametrize("prefix", ["backbone.", "model.", ""])
def test_every_spelling_is_read_and_every_tensor_is_written_D15(
    changed: Any, nemotrons: Any, tmp_path: Path, embedding: str, prefix: str
) -> None:
    def spell(state: dict[str, Tensor]) -> None:
        for name in list(state):
            other = name.replace("backbone.", prefix).replace("embeddings", embedding)
            state[other] = state.pop(name)

    um.save(um.load(changed(spell)), tmp_path / "saved")
    assert files(tmp_path / "saved") == files(nemotrons())


@pytest.mark.parametrize("name", ["backbone.embeddings.weight", "backbone.norm_f.weight"])
def test_a_missing_tensor_stops_D15(changed: Any, name: str) -> None:
    with pytest.raises(ValueError, match=rf"missing \(1\): {name}"):
        um.load(changed(lambda state: state.pop(name)))


def test_input_scales_of_weights_that_have_none_are_skipped_D16(changed: Any) -> None:
    """Four bits with 16-bit activations, and plain weights: told, and not counted as unused."""
    names = [
        "backbone.layers.1.mixer.experts.3.up_proj.input_scale",
        "backbone.layers.3.mixer.q_proj.input_scale",
        "lm_head.input_scale",
    ]
    folder = changed(lambda s: s.update({name: torch.tensor(0.02) for name in names}))
    assert said_by(folder)[names[0]] == "skipped: activations stay as they are (W4A16)"
    model = um.load(folder)
    assert set(model.load_report.skipped) == set(names)
    assert "activations stay as they are" in str(model.load_report)
    assert not set(names) & {name for name, _ in um.named_tensors(model)}


@pytest.mark.parametrize(
    "name",
    [
        "backbone.layers.3.mixer.k_proj.k_scale",
        "backbone.layers.1.mixer.experts.8.up_proj.weight_scale",
        "backbone.layers.1.mixer.experts.0.gate_proj.input_scale",
        "backbone.layers.3.mixer.q_scale",
    ],
)
def test_scales_that_nothing_reads_are_named_D16(changed: Any, name: str) -> None:
    """No FP8 cache, no ninth expert, no gate: neither a KeyError nor silence."""
    folder = changed(lambda state: state.update({name: torch.tensor(0.5)}), None)
    assert said_by(folder)[name] == "unused"
    with pytest.raises(ValueError, match=rf"unused \(1\): {name}"):
        um.load(folder)


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_2"])
def test_a_missing_scale_of_one_expert_stops_D17(changed: Any, scale: str) -> None:
    name = "backbone.layers.4.mixer.experts.5.down_proj"
    told = rf"{name}\.weight is U8 and its scale is missing: .*{name}\.{scale} is missing"
    with pytest.raises(ValueError, match=told):
        um.load(changed(lambda state: state.pop(f"{name}.{scale}")))


def test_a_missing_input_scale_stops_D17(changed: Any) -> None:
    name = "backbone.layers.2.mixer.out_proj"
    told = rf"{name}\.weight holds fp8_tensor, .* and {name}\.input_scale is missing"
    folder = changed(lambda state: state.pop(f"{name}.input_scale"))
    with pytest.raises(ValueError, match=told):
        um.load(folder)
    assert any(f"{name}.input_scale is missing" in p for p in checkpoint.describe(folder).problems)


def test_cache_scales_are_used_where_they_are_D18(
    changed: Any, nemotrons: Any, tmp_path: Path
) -> None:
    """k_scale 0.5 in one layer, absent in another: 1 there, told once, with the layers; the trainer gets the same."""
    absent = [f"backbone.layers.{n}.mixer.{w}_proj.{w}_scale" for n, w in ((3, "v"), (5, "k"))]

    def edit(state: dict[str, Tensor]) -> None:
        state["backbone.layers.3.mixer.k_proj.k_scale"] = torch.tensor([0.5])
        for name in absent:
            del state[name]

    folder = changed(edit)
    for options in ({}, {"weights": "file"}, {"numerics": "float32"}):
        model = um.load(folder, **options)
        three, five = model.blocks[3].mixer, model.blocks[5].mixer
        scales = (three.k_scale, three.v_scale, five.k_scale)
        assert [weight().value.item() for weight in scales] == [0.5, 1, 1]
        assert five.v_scale().value.item() == pytest.approx(0.01, rel=0.7)
        (line,) = model.load_report.defaults
        assert line == f"1.0 for 2 tensors that are not there: {', '.join(absent)}"
        assert str(model.load_report).count(line) == 1
    assert checkpoint.describe(folder).notes == (line,)
    other = um.load(nemotrons())
    before = um.logprobs(other, IDS)[0]
    checkpoint.update(other, um.named_tensors(um.load(folder)))
    after = um.logprobs(other, IDS)[0]
    assert torch.equal(after, um.logprobs(um.load(folder), IDS)[0])
    assert not torch.equal(after, before), "the control: the scales matter"
    um.save(model, tmp_path / "saved")
    saved = load_file(tmp_path / "saved/model.safetensors")
    assert all(saved[name].item() == 1 for name in absent), "a save writes them all"


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
def test_a_cache_scale_that_is_no_positive_number_stops_D18(changed: Any, value: float) -> None:
    name = "backbone.layers.3.mixer.v_proj.v_scale"
    folder = changed(lambda state: state.update({name: torch.tensor(value)}))
    with pytest.raises(ValueError, match=rf"{name} is {value}, expected a finite number above 0"):
        um.load(folder)
    assert len(checkpoint.describe(folder).problems) == 1


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda codes: codes.t().contiguous(), r"is U8 \(64, 80\), expected \(80, 64\)"),
        (lambda codes: codes.float(), r"is F32 \(80, 64\), expected \(80, 128\)"),
        (lambda codes: codes.bfloat16().repeat(1, 2), r"weight_scale scales nothing: .* is BF16"),
        (lambda codes: codes.repeat(1, 2), r"is U8 \(80, 128\), expected \(80, 64\)"),
    ],
    ids=["transposed", "floats", "values", "one code a byte"],
)
def test_codes_of_another_kind_are_refused_D20(changed: Any, edit: Any, told: str) -> None:
    name = "backbone.layers.1.mixer.experts.2.up_proj.weight"
    with pytest.raises(ValueError, match=rf"backbone\.layers\.1\.mixer\.experts\.2.*{told}"):
        um.load(changed(lambda state: state.update({name: edit(state[name])})))


@torch.no_grad()
def test_packed_only_has_the_trainers_bits(nemotrons: Any) -> None:
    """A serving process without masters: the packing rule's bytes, not the file's."""
    trainer, server = um.load(nemotrons()), um.load(nemotrons(), weights="packed")
    assert all(weight.master is None for _, weight in server.weights())
    assert server.weights_from == trainer.weights_from == "master"
    compared = um.verify.bits(um.logprobs(trainer, IDS), um.logprobs(server, IDS))
    assert compared.compared == 19 and compared.unequal == 0
    server_bytes = dict(server.named_buffers())
    held = [(name, t) for name, t in trainer.named_buffers() if name in server_bytes]
    assert len(held) > 20 and all(torch.equal(t, server_bytes[name]) for name, t in held)


def test_block_scales_of_zero_are_values_of_zero(nemotrons: Any, tmp_path: Path) -> None:
    """ModelOpt before 0.30 left the scales of tiny blocks at 0; the codes beside them say nothing."""
    state = load_file(nemotrons() / "model.safetensors")
    name = "backbone.layers.1.mixer.experts.2.up_proj"
    state[f"{name}.weight_scale"].view(torch.uint8)[5, 3] = 0
    folder = tmp_path / "zero"
    shutil.copytree(nemotrons(), folder)
    save_file(state, folder / "model.safetensors")
    model = um.load(folder)
    master = dict(model.weights())["blocks.1.mixer.experts.up"].master
    assert not master[2, 5, 48:64].any() and master[2, 5, :48].any()
