"""Weight formats against independent statements of their rules, in numpy and by loops."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unified_models import formats
from unified_models.formats.fp4 import E2M1
from unified_models.formats.weights import FORMATS, accepts, find, pack_pieces
from unified_models.weight import Weight

FP8 = ("fp8_ue8m0", "fp8_float32")
QUANTISED = (*FP8, "mxfp4")
SHAPES = [(128, 128), (576, 320), (129, 1), (1, 129), (200, 384), (10944, 3)]


def fp8_oracle(
    master: Tensor, power_of_two: bool
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Scales (float64) and dequantised float32 values, one block after the other."""
    w = master.bfloat16().float().numpy()
    n, k = w.shape
    scales = np.zeros((-(-n // 128), -(-k // 128)))
    values = np.zeros((n, k), dtype=np.float32)
    for i, j in np.ndindex(*scales.shape):
        block = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        amax = np.maximum(np.abs(w[block]).max(), np.float32(1e-10))
        scale = amax / np.float32(448)
        if power_of_two:
            fraction, exponent = math.frexp(float(scale))
            scale = np.float32(2.0 ** (exponent - (fraction == 0.5)))
        scales[i, j] = scale
        quotient = torch.from_numpy(w[block] / scale).clamp(-448, 448)
        values[block] = quotient.to(torch.float8_e4m3fn).float().numpy() * scale
    return scales, values


@pytest.mark.parametrize("name", FP8)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_c14_block_fp8(name: str, shape: tuple[int, int]) -> None:
    format, master = find(name), torch.randn(shape) * torch.logspace(-6, 3, shape[1])
    packed = format.pack(master)
    scales, values = fp8_oracle(master, name == "fp8_ue8m0")
    assert packed["codes"].dtype == torch.uint8 and packed["codes"].shape == shape
    found = (
        packed["scales"].double()
        if name == "fp8_float32"
        else 2.0 ** (packed["scales"].double() - 127)
    )
    assert np.array_equal(found.numpy(), scales)
    assert np.array_equal(format.unpack(packed, master.shape).numpy(), values)


def test_c14_merged_projections_keep_their_blocks() -> None:
    """512 + 64 rows in one matrix: the last 64 rows have a scale of their own."""
    master = torch.cat((torch.full((512, 128), 100.0), torch.full((64, 128), 0.001)))
    packed = find("fp8_ue8m0").pack(master)
    assert packed["scales"].shape == (5, 1) and packed["scales"][4, 0] < packed["scales"][3, 0] - 10
    assert torch.equal(packed["codes"][512:], find("fp8_ue8m0").pack(master[512:])["codes"])


def test_c08_the_scale_is_rounded_first() -> None:
    """One block with amax 1.5 * 448: the scale is 2, and every value is within half a step of its code."""
    x = torch.linspace(-1, 1, 128 * 128).view(128, 128) * (1.5 * 448)
    x = x.bfloat16().float()
    for name in FP8:
        format = find(name)
        packed = format.pack(x)
        scale = 2.0 if name == "fp8_ue8m0" else 1.5
        assert torch.equal(
            format.unpack(packed, x.shape),
            packed["codes"].view(torch.float8_e4m3fn).float() * scale,
        )
        q = packed["codes"].view(torch.float8_e4m3fn).float()
        step = 2.0 ** (q.abs().clamp_min(2.0**-6).log2().floor() - 3)
        assert ((x - q * scale).abs() <= scale * step / 2).all()


def mxfp4_oracle(row: list[float]) -> tuple[int, list[int]]:
    """e8m0 byte and 4-bit codes of 32 bfloat16 values."""
    amax = max(np.float32(1e-10), *(np.float32(abs(x)) for x in row))
    fraction, exponent = math.frexp(float(amax / np.float32(6)))
    byte = min(max(exponent - (fraction == 0.5) + 127, 1), 254)
    codes = []
    for x in row:
        scaled = abs(x) / 2.0 ** (byte - 127)
        best = min(range(8), key=lambda code: (abs(E2M1[code] - scaled), code % 2))
        codes.append(best | (math.copysign(1, x) < 0) << 3)
    return byte, codes


@pytest.mark.parametrize("spread", [0.0, 1.0, 6.0])
def test_mxfp4(spread: float) -> None:
    master = torch.randn(64, 96) * torch.exp(spread * torch.randn(64, 96))
    master[3, :32] = 0
    packed = find("mxfp4").pack(master)
    for i, j in itertools.product(range(64), range(3)):
        byte, codes = mxfp4_oracle(master.bfloat16().float()[i, 32 * j : 32 * j + 32].tolist())
        assert packed["scales"][i, j] == byte
        pairs = packed["codes"][i, 16 * j : 16 * j + 16].tolist()
        assert [code for pair in pairs for code in (pair & 15, pair >> 4)] == codes


def test_mxfp4_ties_go_to_the_even_code() -> None:
    middles = [(low + high) / 2 for low, high in itertools.pairwise(E2M1)]
    around = [x for m in middles for x in (m * (1 - 2**-7), m, m * (1 + 2**-7))]
    row = torch.tensor([*around, 6.0, *[0.0] * 10])
    both = torch.stack((row, -row))
    codes = find("mxfp4").pack(both)["codes"]
    expected = [c for i in range(7) for c in (i, i + i % 2, i + 1)]
    for pairs, sign in zip(codes, (0, 8), strict=True):
        found = [c for pair in pairs.tolist() for c in (pair & 15, pair >> 4)]
        assert found[:21] == [c | sign for c in expected]


def test_d19_the_low_nibble_comes_first() -> None:
    """Byte 0x21 is code 1, then code 2: 0.5 and 1."""
    packed = {
        "codes": torch.full((1, 16), 0x21, dtype=torch.uint8),
        "scales": torch.tensor([[127]], dtype=torch.uint8),
    }
    values = find("mxfp4").unpack(packed, torch.Size((1, 32)))
    assert values[0, :4].tolist() == [0.5, 1.0, 0.5, 1.0]
    assert torch.equal(find("mxfp4").pack(torch.tensor([[0.5, 1.0, 6.0] + [0.0] * 29]))["codes"][0, :2].int(),
                       torch.tensor([0x21, 0x07], dtype=torch.int32))  # fmt: skip


def test_mxfp4_needs_whole_groups() -> None:
    with pytest.raises(ValueError, match=r"mxfp4 needs K a multiple of 32, got .* \(4, 48\)"):
        find("mxfp4").pack(torch.zeros(4, 48))


@pytest.mark.parametrize("name", QUANTISED)
def test_c15_zeros_stay_zeros(name: str) -> None:
    format, master = find(name), torch.zeros(256, 256)
    master[:128, 128:] = torch.randn(128, 128)
    master[5] = 0
    packed = format.pack(master)
    values = format.unpack(packed, master.shape)
    assert values[:128, 128:].count_nonzero() > 0
    assert (
        values[128:].count_nonzero()
        == values[:, :128].count_nonzero()
        == values[5].count_nonzero()
        == 0
    )
    assert packed["scales"].float().isfinite().all()
    if packed["scales"].dtype == torch.uint8:
        assert (packed["scales"] < 255).all(), "255 is NaN"
    else:
        assert (packed["scales"] > 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_packing_rounds_to_bfloat16_first(name: str) -> None:
    format, master = find(name), torch.randn(64, 96)
    for kept in (
        master.bfloat16(),
        master.bfloat16().float(),
        *([] if name == "float32" else [master]),
    ):
        expected = format.pack(master.bfloat16())
        if name == "float32":
            expected = {"values": master.bfloat16().float()}
        packed = format.pack(kept)
        assert all(torch.equal(packed[key], expected[key]) for key in expected)
    assert find("float32").pack(master)["values"].equal(master), (
        "float32 parameters are never rounded"
    )


@pytest.mark.parametrize("name", ["fp8_ue8m0", "mxfp4", "bfloat16"])
@pytest.mark.parametrize("spread", [0.0, 8.0])
def test_packing_again_keeps_values(name: str, spread: float) -> None:
    """With power-of-two scales. Bytes may move once, then no more."""
    format, master = find(name), torch.randn(300, 288) * torch.exp(spread * torch.randn(300, 288))
    once = format.pack(master)
    values = format.unpack(once, master.shape)
    twice = format.pack(values)
    assert torch.equal(format.unpack(twice, master.shape), values)
    thrice = format.pack(format.unpack(twice, master.shape))
    assert all(torch.equal(twice[key], thrice[key]) for key in twice)


@pytest.mark.parametrize("name", FORMATS)
def test_stacks_are_packed_matrix_by_matrix(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    format, master = find(name), torch.randn(5, 130, 160)
    expected = [format.pack(matrix) for matrix in master]
    for piece in (1 << 24, 3 * 130 * 160, 1):
        monkeypatch.setattr("unified_models.formats.weights.PIECE", piece)
        packed = pack_pieces(format, master)
        for key, values in packed.items():
            assert all(torch.equal(values[e], expected[e][key]) for e in range(5))
        assert torch.equal(
            format.unpack(packed, master.shape)[3], format.unpack(expected[3], master.shape[1:])
        )


@pytest.mark.parametrize("name", FORMATS)
def test_f18_the_gradient_passes_every_rounding(name: str) -> None:
    """Identity, within a block and beyond what its scale holds: dMaster = dValue, in the master's dtype."""
    weight = Weight(None, 64, None, 96, format=name)
    with torch.no_grad():
        assert weight.master is not None
        weight.master.normal_()
        weight.master[0, 0] = 3e38
    weight.commit()
    upstream = torch.randn(64, 96)
    weight().value.backward(upstream)
    assert weight.master.grad is not None and torch.equal(weight.master.grad, upstream)


@pytest.mark.parametrize("name", FORMATS)
def test_the_value_is_that_of_the_packed_bytes(name: str) -> None:
    weight = Weight(None, 64, None, 96, format=name)
    with torch.no_grad():
        assert weight.master is not None
        weight.master.normal_()
    weight.commit()
    format = find(name)
    assert torch.equal(weight().value, format.unpack(format.pack(weight.master), weight.shape))


def test_names() -> None:
    assert find("fp8") is find("fp8_ue8m0")
    with pytest.raises(
        ValueError, match="unknown weight format 'fp5'; known: bfloat16, float32, fp8_"
    ):
        formats.find("fp5")
    assert all(accepts(None, name) for name in FORMATS)
    assert [name for name in FORMATS if accepts("fp8", name)] == list(FP8)
    assert [name for name in FORMATS if accepts("mxfp4", name)] == ["mxfp4"]
