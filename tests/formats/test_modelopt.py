"""ModelOpt's formats - FP8 with one scale, NVFP4 under its two rules - against their rules, said again in numpy.

The oracle computes in float64 and rounds to float32 once wherever the rule's own value is a float32.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unified_models.formats.weights import FORMATS, accepts, find

Array = np.ndarray[Any, Any]
RULES = {"nvfp4": 448, "nvfp4_four_over_six": 256}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [(8 + m) * 2.0 ** (e - 10) if e else m * 2.0**-9 for e in range(16) for m in range(8)][:127]
)


def f32(x: Array) -> Array:
    """Rounded to float32 once, kept in float64."""
    return np.asarray(x, dtype=np.float64).astype(np.float32).astype(np.float64)


def nearest(x: Array, grid: Array) -> Array:
    """The index of the nearest value of a grid, ties to the even index, the last one beyond it."""
    above = np.searchsorted(grid, x).clip(1, len(grid) - 1)
    low, high = x - grid[above - 1], grid[above] - x
    even = np.where(above % 2 == 0, above, above - 1)
    return np.where(low == high, even, np.where(low < high, above - 1, above))


@dataclass
class Candidate:
    """Codes [.., 16] (with signs), e4m3 codes of the scales, and the exact squared error of each group of 16."""

    codes: Array
    scales: Array
    values: Array
    errors: Array


def candidate(groups: Array, amax: Array, whole: float) -> Candidate:
    ratio = f32(amax / f32(6 * whole))
    ratio = np.maximum(np.where(ratio == 0, 1.0, ratio), 2.0**-9)
    scales = nearest(ratio, E4M3)
    step = f32(E4M3[scales] * whole)
    codes = nearest(f32(np.abs(groups) / step[..., None]), E2M1)
    values = f32(E2M1[codes] * step[..., None]) * np.where(np.signbit(groups), -1, 1)
    signs = np.where(np.signbit(groups), 8, 0)
    return Candidate(codes | signs, scales, values, ((values - groups) ** 2).sum(-1))


def rule(w: Array, largest: int) -> tuple[float, Candidate, Array]:
    """The global scale, what the rule chooses of each group, and which groups the oracle cannot tell: two errors so
    near to each other, and not equal, that float32 sums decide."""
    whole = float(f32(np.abs(w).max() / (6 * largest)))
    whole = 1.0 if whole == 0 else whole
    groups = w.reshape(*w.shape[:-1], -1, 16)
    amax = np.abs(groups).max(-1)
    six = candidate(groups, amax, whole)
    if largest == 448:
        return whole, six, np.zeros(amax.shape, dtype=bool)
    four = candidate(groups, 1.5 * amax, whole)
    better = four.errors < six.errors
    apart = np.abs(four.errors - six.errors)
    near = (apart > 0) & (apart < 1e-5 * np.maximum(four.errors, six.errors))
    pick = Candidate(
        np.where(better[..., None], four.codes, six.codes),
        np.where(better, four.scales, six.scales),
        np.where(better[..., None], four.values, six.values),
        np.minimum(four.errors, six.errors),
    )
    return whole, pick, near


def unpaired(pairs: Tensor) -> Array:
    """4-bit codes, the low nibble first."""
    raw = pairs.numpy()
    return np.stack((raw & 15, raw >> 4), -1).reshape(*raw.shape[:-1], -1, 16)


def random_matrix(n: int, k: int, spread: float, size: float) -> Tensor:
    """bfloat16 values whose groups of 16 differ in size by powers of e^spread."""
    sizes = torch.exp(spread * torch.randn(n, k // 16, 1))
    return (torch.randn(n, k // 16, 16) * sizes * size).flatten(-2).bfloat16()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
@pytest.mark.parametrize("size", [1.0, 0.017, 3.3e4, 1e-12], ids=str)
def test_nvfp4_is_the_rule_of_modelopt(name: str, spread: float, size: float) -> None:
    master = random_matrix(48, 320, spread, size)
    master[3, :32] = 0
    master[5] = 0
    master[7, 2::5] = 0
    packed = find(name).pack(master.float())
    whole, expected, near = rule(master.double().numpy(), RULES[name])
    assert packed["global"].dtype == torch.float32 and packed["global"].item() == whole
    told = ~near
    assert told.mean() > 0.99 and near.sum() < 5
    scales = packed["scales"].numpy()
    assert packed["scales"].dtype == torch.uint8 and np.array_equal(
        scales[told], expected.scales[told]
    )
    codes = unpaired(packed["codes"])
    assert np.array_equal(codes[told], expected.codes[told])
    values = find(name).unpack(packed, master.shape).numpy().reshape(expected.values.shape)
    assert np.array_equal(values[told], expected.values[told].astype(np.float32))
    assert codes.size == master.numel() and values.dtype == np.float32
    if spread == 4:
        assert (scales == 1).any(), "some groups are clamped to the smallest scale, 2^-9"
        assert (scales < 8).sum() > 50, "and many scales are subnormal"
    if name == "nvfp4_four_over_six" and spread == 0:
        largest = np.abs(values).max(-1) / (E4M3[scales] * whole)
        share = (np.abs(largest - 4) < 1e-5).mean()
        assert 0.3 < share < 0.6, "nearly half of the groups put their largest value on 4"


@pytest.mark.parametrize("name", RULES)
def test_nvfp4_the_largest_scale_tells_the_rule(name: str) -> None:
    """448 under one rule; 256 to 384 under the other."""
    seen = set()
    for _ in range(40):
        scales = find(name).pack(torch.randn(16, 64))["scales"]
        seen.add(scales.view(torch.float8_e4m3fn).float().max().item())
    assert (min(seen), max(seen)) == ((448, 448) if name == "nvfp4" else (256, 384))


def test_nvfp4_the_block_scale_is_one_division() -> None:
    """amax / (6 * global), as ModelOpt's export does it. Its other path, (amax / 6) / global, rounds otherwise: the
    ratios here are ties of e4m3, where one float32 ulp decides."""
    middles = (E4M3[64:120] + E4M3[65:121]) / 2  # exact in bfloat16, as all of e4m3 is
    groups = np.zeros((len(middles), 16))
    groups[:, 0] = middles
    groups[0, 0] = 448  # the global scale is float32(1/6), and 6 times that is 1
    packed = find("nvfp4").pack(torch.from_numpy(groups).float())
    found = packed["scales"].numpy()[1:, 0]
    assert np.array_equal(found, nearest(middles[1:], E4M3)) and (found % 2 == 0).all()
    other = f32(f32(middles[1:] / 6) / packed["global"].item())
    assert (nearest(other, E4M3) != found).sum() > 5, "the control: another order, other scales"


@pytest.mark.parametrize("name", RULES)
def test_nvfp4_ties_signs_and_saturation(name: str) -> None:
    """Ties go to the even code. -0 keeps its sign, which packing again keeps, too; so do values that round to 0."""
    ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
    row = torch.tensor([6.0, *ties, *(-t for t in ties), -0.0])
    scale = 448 if name == "nvfp4" else 256
    packed = find(name).pack((row * scale)[None])  # the global scale is 1, the block's is `scale`
    assert packed["global"].item() == 1
    codes = unpaired(packed["codes"])[0, 0].tolist()
    even = [0, 2, 2, 4, 4, 6, 6]
    if name == "nvfp4":
        assert packed["scales"].view(torch.float8_e4m3fn).float().item() == 448
        assert codes == [7, *even, *(8 + c for c in even), 8]
    zeros = unpaired(find(name).pack(torch.tensor([[6.0, -0.0, 0.0, -0.1] + [0.0] * 12]))["codes"])
    assert zeros[0, 0, :4].tolist() == [7, 8, 0, 8]
    # a scale that was rounded down leaves values beyond 6 steps: 1.06 of a tie's lower neighbour
    row = torch.zeros(2, 16)
    row[0, 0], row[1, 0] = 6 * scale, 6 * 17.0  # 17 lies between the scales 16 and 18
    packed = find(name).pack(row)
    kept = find(name).unpack(packed, row.shape)
    assert kept[1, 0] == (96 if name == "nvfp4" else pytest.approx(102, rel=0.07))


def test_four_over_six_takes_the_better_grid() -> None:
    """Values on the grid of 4 go there, values on both stay on that of 6, and neither loses anything."""
    row = torch.zeros(3, 16)
    row[0, :3] = torch.tensor([1536.0, 256, 128])  # the global scale is 1; 6, 1 and 0.5 times 256
    row[1, :4] = torch.tensor([32.0, 24, 16, -4])  # 4, 3, 2 and 0.5 times 8; on 6 no 24 is left
    row[2, :2] = torch.tensor([48.0, -24])  # 6 and 3 times 8, or 4 and 2 times 12
    format = find("nvfp4_four_over_six")
    packed = format.pack(row)
    assert packed["scales"].view(torch.float8_e4m3fn).float()[:, 0].tolist() == [256, 8, 8]
    assert unpaired(packed["codes"])[1, 0, :4].tolist() == [6, 5, 4, 9]
    assert torch.equal(format.unpack(packed, row.shape), row)
    assert not torch.equal(find("nvfp4").unpack(find("nvfp4").pack(row), row.shape), row)


def test_the_low_nibble_comes_first_D19() -> None:
    """Byte 0x21 is code 1, then code 2: 0.5 and 1."""
    packed = {
        "codes": torch.full((1, 8), 0x21, dtype=torch.uint8),
        "scales": torch.tensor([[0x38]], dtype=torch.uint8),  # e4m3 of 1
        "global": torch.tensor(1.0),
    }
    for name in RULES:
        values = find(name).unpack(packed, torch.Size((1, 16)))
        assert values[0].tolist() == [0.5, 1.0] * 8
    row = torch.tensor([[0.5, 1.0, 6.0, -4.0] + [0.0] * 12]) * 448
    codes = find("nvfp4").pack(row)["codes"][0, :2]
    assert [f"{byte:02x}" for byte in codes.tolist()] == ["21", "e7"]


@pytest.mark.parametrize("name", RULES)
def test_code_times_scale_is_exact_in_bfloat16(name: str) -> None:
    """Every code with every scale: what a linear reads, before the global scale."""
    scales = torch.arange(1, 127, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8)
    pairs = (codes[0::2] | codes[1::2] << 4).expand(126, 8)
    read = find(name).scaled_codes(  # type: ignore[attr-defined]
        {"codes": pairs, "scales": scales, "global": torch.tensor(3.0)}
    )
    exact = E4M3[1:, None] * np.concatenate((E2M1, -E2M1))
    assert np.array_equal(read.double().numpy(), exact) and read.numel() == 126 * 16
    assert torch.equal(read.bfloat16().float(), read)


@pytest.mark.parametrize("name", [*RULES, "fp8_tensor"])
@pytest.mark.parametrize("spread", [0.0, 0.8])
def test_packing_what_was_packed_changes_nothing(name: str, spread: float) -> None:
    """bf16(dequantised) packs to the same values, and to the same bytes but where a group lies on both grids of
    four-over-six; packed once more, no byte moves."""
    format, compared = find(name), 0
    for size in torch.rand(6).add(0.1).tolist():
        once = format.pack(random_matrix(32, 160, spread, size).float())
        values = format.unpack(once, torch.Size((32, 160)))
        again = format.pack(values)
        assert torch.equal(format.unpack(again, values.shape), values)
        if name != "nvfp4_four_over_six":
            assert all(torch.equal(once[key], again[key]) for key in once)
        thrice = format.pack(format.unpack(again, values.shape))
        assert all(torch.equal(again[key], thrice[key]) for key in once)
        compared += values.numel()
    assert compared == 6 * 32 * 160


def test_the_smallest_scales_may_move_once_more() -> None:
    """Where a scale is rounded up by a third, to 2 * 2^-9, the largest value lands on 4 and takes the scale 2^-9 the
    next time: such a group, a hundred thousand times smaller than the largest, changes and is reported."""
    row = torch.zeros(2, 16)
    row[0, 0], row[1, 0] = 6 * 448.0, 6 * 1.55 * 2.0**-9
    format = find("nvfp4")
    once = format.unpack(format.pack(row), row.shape)
    twice = format.unpack(format.pack(once), row.shape)
    assert once[1, 0] == 8 * 2.0**-9 and twice[1, 0] == 6 * 2.0**-9
    assert torch.equal(format.unpack(format.pack(twice), row.shape), twice)


@pytest.mark.parametrize("name", [*RULES, "fp8_tensor"])
def test_a_matrix_of_zeros(name: str) -> None:
    master = torch.zeros(16, 32)
    master[3, 4] = -0.0
    packed = find(name).pack(master)
    assert find(name).unpack(packed, master.shape).count_nonzero() == 0
    for scale in ("scale", "scales", "global"):
        if scale in packed:
            values = packed[scale]
            values = values if scale != "scales" else values.view(torch.float8_e4m3fn)
            assert (values.float() > 0).all() and values.float().isfinite().all()
    if name in RULES:
        assert packed["global"] == 1 and (packed["scales"] == 0x38).all()


@pytest.mark.parametrize("name", RULES)
def test_nvfp4_needs_whole_groups_D20(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} needs K a multiple of 16, got .* \(4, 24\)"):
        find(name).pack(torch.zeros(4, 24))


@pytest.mark.parametrize("spread", [0.0, 3.0])
@pytest.mark.parametrize("size", [1.0, 0.017, 3.3e4, 1e-11], ids=str)
def test_fp8_with_one_scale(spread: float, size: float) -> None:
    """amax / 448, and codes of value / scale; each a float32."""
    master = random_matrix(40, 80, spread, size)
    packed = find("fp8_tensor").pack(master.float())
    w = master.double().numpy()
    scale = float(f32(np.maximum(np.abs(w).max(), float(np.float32(1e-10))) / 448))
    assert packed["scale"].dtype == torch.float32 and packed["scale"].item() == scale
    codes = nearest(f32(np.abs(w) / scale), E4M3)
    expected = codes | np.where(np.signbit(w), 128, 0)
    assert packed["codes"].dtype == torch.uint8 and np.array_equal(
        packed["codes"].numpy(), expected
    )
    values = find("fp8_tensor").unpack(packed, master.shape).numpy()
    assert np.array_equal(values, (E4M3[codes] * scale * np.sign(w)).astype(np.float32))
    assert codes.max() == (126 if size > 1e-10 else codes.max())


@pytest.mark.parametrize("name", [*RULES, "fp8_tensor"])
def test_each_matrix_of_a_stack_has_its_own_scale_A34(name: str) -> None:
    master = torch.randn(3, 16, 32) * torch.tensor([1.0, 1e-3, 50.0])[:, None, None]
    packed = find(name).pack(master)
    for e in range(3):
        alone = find(name).pack(master[e])
        assert all(torch.equal(packed[key][e], alone[key]) for key in alone)
    whole = packed["global" if name in RULES else "scale"]
    assert whole.shape == (3,) and len(set(whole.tolist())) == 3


def test_names_of_the_family() -> None:
    assert find("nvfp4").name == "nvfp4"
    assert [name for name in FORMATS if accepts("nvfp4", name)] == list(RULES)
    assert [n for n in FORMATS if accepts("nvfp4_four_over_six", n)] == ["nvfp4_four_over_six"]
    assert [name for name in FORMATS if accepts("fp8_tensor", name)] == ["fp8_tensor"]
    assert [f.input for f in map(find, (*RULES, "fp8_tensor"))] == ["plain", "plain", "static"]
