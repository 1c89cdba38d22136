"""Which format a file holds a matrix in: decided by names, dtypes and shapes; what does not fit is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from unified_models import formats
from unified_models.checkpoint.quantized import beside, recognise
from unified_models.checkpoint.shards import Stored


def stored(name: str, dtype: str, *shape: int) -> Stored:
    return Stored(name, Path("f"), dtype, shape, 0)


@pytest.mark.parametrize(
    ("n", "k", "scale"),
    [
        (576, 320, (5, 3)),
        (576, 512 + 64, (5, 5)),
        (129, 1, (2, 1)),
        (10944, 7, (86, 1)),
        (128, 128, (1, 1)),
    ],
)
@pytest.mark.parametrize("dtype", ["F32", "F8_E8M0"])
def test_c14_partial_blocks(n: int, k: int, scale: tuple[int, int], dtype: str) -> None:
    weight = stored("x.weight", "F8_E4M3", n, k)
    scales = {"scale": stored("x.scale", dtype, *scale)}
    kind, pieces = recognise(weight, scales, torch.Size((n, k)), None)
    assert pieces == {"scales": scales["scale"]}
    assert kind == ("fp8_float32" if dtype == "F32" else "fp8_ue8m0")
    packed = formats.find(kind).pack(torch.ones(n, k))
    assert tuple(packed["scales"].shape) == scale
    assert torch.equal(formats.find(kind).unpack(packed, torch.Size((n, k))), torch.ones(n, k))
    for wrong in ((scale[0] + 1, scale[1]), (scale[0], scale[1] + 1), (n // 128, k // 128)):
        if wrong == scale:
            continue
        with pytest.raises(
            ValueError, match=rf"x\.scale is {dtype} \({wrong[0]}, {wrong[1]}\), expected"
        ):
            recognise(weight, {"scale": stored("x.scale", dtype, *wrong)}, torch.Size((n, k)), None)


E4M3, I8, E8M0 = "F8_E4M3", "I8", "F8_E8M0"


SCALE, W_SCALE, W_GLOBAL = "scale", "weight_scale", "weight_scale_2"


@pytest.mark.parametrize(
    ("weight", "scales", "complaint"),
    [
        (
            (E4M3, 64, 96),
            {},
            r"x\.weight is F8_E4M3 and its scale is missing: neither x\.scale nor .* nor x\.weight_scale",
        ),
        ((I8, 64, 48), {}, r"x\.weight is I8 and its scale is missing"),
        (
            ("BF16", 64, 96),
            {SCALE: ("F32", 1, 1)},
            r"x\.scale scales nothing: x\.weight is BF16",
        ),
        ((I8, 64, 96), {SCALE: (E8M0, 64, 3)}, r"x\.weight is I8 \(64, 96\), expected \(64, 48\)"),
        ((I8, 48, 64), {SCALE: (E8M0, 64, 3)}, r"x\.weight is I8 \(48, 64\), expected \(64, 48\)"),
        (
            (I8, 64, 48),
            {SCALE: (E8M0, 64, 6)},
            r"x\.scale is F8_E8M0 \(64, 6\), expected \(64, 3\)",
        ),
        ((I8, 64, 48), {SCALE: ("F32", 64, 3)}, r"x\.scale is F32, expected F8_E8M0 for I8 codes"),
        (
            (E4M3, 64, 96),
            {SCALE: ("BF16", 1, 1)},
            r"x\.scale is BF16, expected F8_E8M0 for F8_E4M3 codes",
        ),
        (
            (E4M3, 96, 64),
            {SCALE: ("F32", 1, 1)},
            r"x\.weight is F8_E4M3 \(96, 64\), expected \(64, 96\)",
        ),
        (
            (E4M3, 64, 96),
            {SCALE: (E8M0, 64, 3)},
            r"x\.scale is F8_E8M0 \(64, 3\), expected \(1, 1\)",
        ),
        (("I64", 64, 96), {}, r"x\.weight is I64, not a dtype of weights"),
        (("F32", 64, 95), {}, r"x\.weight is F32 \(64, 95\), expected \(64, 96\)"),
        # codes of NVFP4: values instead of codes, the other way round, not packed, float scales
        (
            ("BF16", 64, 48),
            {W_SCALE: (E4M3, 64, 6), W_GLOBAL: ("F32",)},
            r"x\.weight is BF16 \(64, 48\), expected \(64, 96\)",
        ),
        (
            ("F32", 64, 96),
            {W_SCALE: (E4M3, 64, 6), W_GLOBAL: ("F32",)},
            r"x\.weight_scale scales nothing: x\.weight is F32",
        ),
        (
            ("U8", 48, 64),
            {W_SCALE: (E4M3, 6, 64), W_GLOBAL: ("F32",)},
            r"x\.weight is U8 \(48, 64\), expected \(64, 48\)",
        ),
        (
            ("U8", 64, 96),
            {W_SCALE: (E4M3, 64, 6), W_GLOBAL: ("F32",)},
            r"x\.weight is U8 \(64, 96\), expected \(64, 48\)",
        ),
        (
            ("U8", 64, 48),
            {W_SCALE: (E4M3, 6, 64), W_GLOBAL: ("F32",)},
            r"x\.weight_scale is F8_E4M3 \(6, 64\), expected \(64, 6\)",
        ),
        (
            ("U8", 64, 48),
            {W_SCALE: ("BF16", 64, 6), W_GLOBAL: ("F32",)},
            r"x\.weight_scale is BF16, expected F8_E4M3 for U8 codes",
        ),
        (
            ("U8", 64, 48),
            {W_SCALE: (E4M3, 64, 6), W_GLOBAL: ("F32", 64)},
            r"x\.weight_scale_2 is F32 \(64,\), expected \(\)",
        ),
        (
            ("U8", 64, 48),
            {W_SCALE: (E4M3, 64, 6)},
            r"x\.weight is U8 and its scale is missing: x\.weight_scale_2 is missing",
        ),
        (
            ("U8", 64, 48),
            {W_GLOBAL: ("F32",)},
            r"x\.weight is U8 and its scale is missing: x\.weight_scale is missing",
        ),
        (
            (E4M3, 64, 96),
            {W_SCALE: ("F32", 64)},
            r"x\.weight_scale is F32 \(64,\), expected \(\)",
        ),
        (
            (E4M3, 64, 96),
            {W_SCALE: ("F32",), W_GLOBAL: ("F32",)},
            r"x\.weight_scale_2 scales nothing: x\.weight is fp8_tensor",
        ),
        (
            (E4M3, 64, 96),
            {SCALE: ("F32", 1, 1), W_SCALE: ("F32",)},
            r"x\.scale and x\.weight_scale are both there",
        ),
        (
            (E4M3, 64, 96),
            {SCALE: ("F32", 1, 1), "weight_scale_inv": ("F32", 1, 1)},
            r"x\.scale and x\.weight_scale_inv are both there",
        ),
    ],
)
def test_what_does_not_fit_is_refused_E09_D17_D20(weight: Any, scales: Any, complaint: str) -> None:
    given = {name: stored(f"x.{name}", *scale) for name, scale in scales.items()}
    with pytest.raises(ValueError, match=complaint):
        recognise(stored("x.weight", *weight), given, torch.Size((64, 96)), None)


@pytest.mark.parametrize("dtype", ["U8", "I8"])
@pytest.mark.parametrize("one", [(), (1,)], ids=str)
def test_true_widths_come_from_packed_ones_D20(dtype: str, one: tuple[int, ...]) -> None:
    """Codes [N, K/2] are a weight [N, K], whichever byte they are called; a single scale is [] or [1]."""
    scales = {
        W_SCALE: stored("x.weight_scale", E4M3, 64, 6),
        W_GLOBAL: stored("x.weight_scale_2", "F32", *one),
    }
    weight = stored("x.weight", dtype, 64, 48)
    kind, pieces = recognise(weight, scales, torch.Size((64, 96)), None)
    assert kind == "nvfp4" and pieces == {"scales": scales[W_SCALE], "global": scales[W_GLOBAL]}
    scales = {W_SCALE: stored("x.weight_scale", "F32", *one)}
    kind, pieces = recognise(stored("x.weight", E4M3, 64, 96), scales, torch.Size((64, 96)), None)
    assert kind == "fp8_tensor" and pieces == {"scale": scales[W_SCALE]}


@pytest.mark.parametrize(("scale", "group"), [(SCALE, 32), (W_SCALE, 16)])
def test_codes_of_four_bits_need_whole_groups(scale: str, group: int) -> None:
    given = {scale: stored(f"x.{scale}", E8M0, 64, 3)}
    with pytest.raises(ValueError, match=rf"needs K a multiple of {group}, it is \(64, 40\)"):
        recognise(stored("x.weight", "U8", 64, 20), given, torch.Size((64, 40)), None)


@pytest.mark.parametrize("shape", [(5,), (256, 1, 4)], ids=["vector", "convolution"])
@pytest.mark.parametrize("scales", [{}, {W_SCALE: ("F32",)}], ids=["alone", "scaled"])
def test_only_matrices_are_quantised_D21(shape: tuple[int, ...], scales: Any) -> None:
    given = {name: stored(f"x.{name}", *scale) for name, scale in scales.items()}
    with pytest.raises(ValueError, match=r"x\.weight is F8_E4M3, expected plain values \("):
        recognise(stored("x.weight", E4M3, *shape), given, torch.Size(shape), None)


def test_scale_names() -> None:
    names = [f"a.{w}" for w in ("scale", "weight_scale_inv", "weight_scale", "weight_scale_2")]
    tensors = {name: stored(name, "F32") for name in (*names, "a.k_scale", "b.scale")}
    assert [scale.name for scale in beside("a.weight", tensors).values()] == names
    assert [scale.name for scale in beside("a", tensors).values()] == names
    assert beside("c.weight", tensors) == {}
