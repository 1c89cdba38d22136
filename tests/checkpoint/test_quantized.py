"""How formats lie in files: recognised by tensors, dequantised exactly, kept by a round trip."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models import checkpoint
from unified_models.checkpoint.quantized import LAYOUTS

MODELOPT = ("fp8_tensor", "nvfp4", "nvfp4_four_over_six")
KINDS = ("bfloat16", "fp8_ue8m0", "fp8_float32", "mxfp4", *MODELOPT)


@pytest.mark.parametrize("kind", KINDS)
def test_c27_dequantised_weights_equal_an_independent_oracle(
    toy: Any, loaded: Any, kind: str
) -> None:
    state = toy.tensors(kind, kind)
    exact, deployed = loaded(state, numerics="float32"), loaded(state)
    for name, path, index in (
        ("layers.0.proj", "blocks.0.proj", None),
        ("layers.1.experts.2.w1", "blocks.1.gate", 2),
        ("layers.1.experts.3.w2", "blocks.1.down", 3),
    ):
        expected = toy.oracle(state, name).float()
        (a, b) = (model.get_submodule(path).master for model in (exact, deployed))
        a, b = (a, b) if index is None else (a[index], b[index])
        assert torch.equal(a, expected)
        assert torch.equal(b, expected.bfloat16().float())


@pytest.mark.parametrize("kind", KINDS)
def test_c13_one_file_with_two_kinds(toy: Any, loaded: Any, kind: str) -> None:
    for linear, experts in ((kind, "mxfp4"), ("fp8_ue8m0", kind)):
        model = loaded(toy.tensors(linear, experts))
        assert model.blocks[0].proj.format.name == linear
        assert model.blocks[1].up.format.name == experts


@pytest.mark.parametrize("kind", LAYOUTS)
def test_e09_a_missing_scale_stops(toy: Any, loaded: Any, kind: str) -> None:
    state = toy.tensors(kind, kind)
    scales = [n for n in state if n.startswith("layers.1.experts.3.w2.") and toy.is_scale(n)]
    del state[scales[-1]]
    with pytest.raises(
        ValueError, match=r"layers\.1\.experts\.3\.w2\.weight is .* its scale is missing"
    ):
        loaded(state)


@pytest.mark.parametrize(
    ("declared", "held"),
    [
        ("fp8_ue8m0", "mxfp4"),
        ("mxfp4", "fp8_ue8m0"),
        ("fp8", "mxfp4"),
        ("fp8_float32", "fp8_ue8m0"),
        ("fp8_ue8m0", "bfloat16"),
        ("bfloat16", "fp8_float32"),
        ("bfloat16", "mxfp4"),
    ],
)
def test_c12_config_and_tensors_contradict(toy: Any, loaded: Any, declared: str, held: str) -> None:
    told = rf"config says {declared} for blocks\.0\.gate, tensor layers\.0\.experts\.0\.w1\.weight holds {held}"
    with pytest.raises(ValueError, match=told):
        loaded(toy.tensors(experts=held), config={"experts": declared})


@pytest.mark.parametrize("kind", KINDS)
def test_c12_a_config_that_does_not_say_takes_what_the_tensors_hold(
    toy: Any, loaded: Any, kind: str
) -> None:
    model = loaded(toy.tensors(kind, kind))
    assert {
        w.format.name for p, w in model.weights() if p.endswith(("proj", "gate", "up", "down"))
    } == {kind}


@pytest.mark.parametrize("member", ["fp8_ue8m0", "fp8_float32"])
def test_c12_a_family_takes_either_member(toy: Any, loaded: Any, member: str) -> None:
    assert (
        loaded(toy.tensors(member), config={"linear": "fp8"}).blocks[0].proj.format.name == member
    )


def test_c13_experts_of_one_stack_agree(toy: Any, loaded: Any) -> None:
    state = toy.tensors(experts="mxfp4")
    for name in [name for name in state if ".experts.2.w1" in name]:
        del state[name]
    generator = torch.Generator().manual_seed(1)
    for layer in range(2):
        state |= toy.matrix(f"layers.{layer}.experts.2.w1", toy.F, toy.M, "fp8_ue8m0", generator)
    told = r"blocks\.0\.gate: layers\.0\.experts\.0\.w1\.weight holds mxfp4, layers\.0\.experts\.2\.w1.* fp8_ue8m0"
    with pytest.raises(ValueError, match=told):
        loaded(state)


@pytest.mark.parametrize("kind", ["fp8_ue8m0", "mxfp4"])
def test_c15_a_scale_that_is_no_number_stops(toy: Any, loaded: Any, kind: str) -> None:
    state = toy.tensors(kind)
    state["layers.1.proj.scale"].view(torch.uint8)[1, 1] = 255
    with pytest.raises(
        ValueError, match=r"layers\.1\.proj\.scale\[1, 1\] is nan, expected a finite number above 0"
    ):
        loaded(state)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 0.0])
@pytest.mark.parametrize(
    ("kind", "scale", "at"),
    [
        ("fp8_float32", "scale", (0, 1)),
        ("fp8_tensor", "weight_scale", ()),
        ("fp8_tensor", "input_scale", ()),
        ("nvfp4", "weight_scale", (129, 9)),
        ("nvfp4", "weight_scale_2", ()),
    ],
)
def test_a_scale_that_is_no_positive_number_stops_C15(
    toy: Any, loaded: Any, kind: str, scale: str, at: tuple[int, ...], value: float
) -> None:
    state = toy.tensors(kind)
    held = state[f"layers.0.proj.{scale}"]
    told = str(value)
    if value == 0 and held.dtype == torch.float8_e4m3fn:  # a block may be 0 throughout
        value, told = -0.5, "-0.5"
    if held.dtype == torch.float8_e4m3fn and value == float("inf"):  # e4m3 has no infinity
        value, told = float("nan"), "nan"
    held[at] = torch.tensor(value).to(held.dtype)
    place = re.escape(str(list(at)) if at else "")
    complaint = rf"layers\.0\.proj\.{scale}{place} is {told}, expected a finite number above 0"
    with pytest.raises(ValueError, match=complaint):
        loaded(state)


def zeroed(toy: Any, kind: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = toy.tensors(kind, kind)
    for name, tensor in state.items():
        if name.endswith(".proj.weight"):
            tensor.view(torch.uint8).zero_()
            tensor.view(torch.uint8)[0, 0] = 0x21
    return state


@pytest.mark.parametrize("kind", KINDS)
def test_c15_zero_blocks_stay_zero(toy: Any, loaded: Any, kind: str) -> None:
    weight = loaded(zeroed(toy, kind)).blocks[0].proj
    values = weight().value
    assert values[1:].count_nonzero() == 0 and values.isfinite().all()


@pytest.mark.parametrize("kind", ["bfloat16", "fp8_ue8m0", "mxfp4"])
def test_c10_exact_formats_are_reported_unchanged(toy: Any, loaded: Any, kind: str) -> None:
    model = loaded(toy.tensors(kind, kind))
    assert model.load_report.changed == ()
    file = toy.oracle(toy.tensors(kind, kind), "layers.0.proj").float()
    assert torch.equal(model.blocks[0].proj().value, file)


def test_c10_float_scales_are_repacked_and_reported(toy: Any, loaded: Any, tmp_path: Path) -> None:
    state = toy.tensors("fp8_float32")
    model = loaded(state)
    changed = {change.name: change for change in model.load_report.changed}
    assert set(changed) == {"layers.0.proj.weight", "layers.1.proj.weight"}
    change = changed["layers.0.proj.weight"]
    assert (change.format, change.blocks, change.changed) == ("fp8_float32", 4, 4)
    old = toy.oracle(state, "layers.0.proj").float()
    new = model.blocks[0].proj().value
    shares = [
        (old[n, k] - new[n, k]).abs().max() / torch.maximum(old[n, k].abs(), new[n, k].abs()).max()
        for n in (slice(0, 128), slice(128, None))
        for k in (slice(0, 128), slice(128, None))
    ]
    assert change.largest == pytest.approx(max(shares).item(), rel=1e-6) and 0 < max(shares) < 0.04
    assert str(change) in str(model.load_report)


def test_c10_both_sides_convert_alike(toy: Any, loaded: Any, same: Any) -> None:
    """Packed bytes of a load, and of another model that was sent its masters."""
    a = loaded(toy.tensors("fp8_float32", "fp8_float32"))
    b = loaded(toy.tensors("fp8_float32", "fp8_float32", seed=1))
    checkpoint.update(b, checkpoint.named_tensors(a))
    for (_, x), (_, y) in zip(a.weights(), b.weights(), strict=True):
        assert all(same(x().packed[name], y().packed[name]) for name in x.packed_names)


@pytest.mark.parametrize("kind", KINDS)
def test_f15_serving_keeps_the_bytes_of_the_file(
    toy: Any, loaded: Any, same: Any, kind: str
) -> None:
    state = toy.tensors(kind, kind)
    model = loaded(state, weights="file")
    assert (model.weights_from, model.load_report.changed) == ("file", ())
    assert list(model.parameters()) == []
    packed = model.blocks[0].proj().packed
    weight = state["layers.0.proj.weight"]
    if kind == "bfloat16":
        assert same(packed["values"], weight)
    else:
        assert same(packed["codes"], weight.view(torch.uint8))
        scales = [t for n, t in state.items() if "layers.0.proj" in n and toy.is_scale(n)]
        kept = [packed[name] for name in packed if name != "codes"]
        assert len(scales) == len(kept) > 0
        for held, file in zip(kept, scales, strict=True):
            assert same(held.reshape(-1).view(torch.uint8), file.reshape(-1).view(torch.uint8))
    assert torch.equal(
        model.blocks[1].gate().value[3], toy.oracle(state, "layers.1.experts.3.w1").float()
    )
