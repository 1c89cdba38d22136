"""Records: the layout that writers and readers of a slot agree on."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unified_models.formats import (
    BFLOAT16_RECORD,
    FLOAT32_RECORD,
    LatentFP8,
    StaticFP8,
    TailRecord,
    VectorFP8,
    round_trip,
)

LATENT = LatentFP8(rope=64)
RECORDS: list[tuple[Any, int]] = [
    (LATENT, 512),
    (LatentFP8(rope=64), 128),
    (LatentFP8(rope=0), 64),
    (VectorFP8(), 128),
    (VectorFP8(), 13),
    (LatentFP8(rope=5), 69),
    (FLOAT32_RECORD, 12),
    (BFLOAT16_RECORD, 12),
    (TailRecord(BFLOAT16_RECORD, 8), 24),
    (TailRecord(BFLOAT16_RECORD, 4), 13),
    (TailRecord(FLOAT32_RECORD, 1), 5),
]
IDS = [f"{record.name}-{dim}" for record, dim in RECORDS]


def rows(dim: int, *leading: int) -> Tensor:
    return torch.randn(*leading, dim) * torch.exp(2 * torch.randn(*leading, dim))


def power(amax: float) -> int:
    """The e8m0 byte of 2^ceil(log2(max(amax, 1e-10) / 448))."""
    fraction, exponent = math.frexp(
        float(np.maximum(np.float32(amax), np.float32(1e-10)) / np.float32(448))
    )
    return exponent - (fraction == 0.5) + 127


def test_c04_bytes_of_a_latent_row() -> None:
    """448 codes, 128 bytes of bfloat16, 7 scales, a zero: 584."""
    x = rows(512, 3)
    data = LATENT.encode(x)
    assert data.dtype == torch.uint8 and data.shape == (3, 584) and LATENT.size(512) == 584
    kept = x.bfloat16()
    assert torch.equal(data[:, 448:576].contiguous().view(torch.bfloat16), kept[:, 448:])
    assert (data[:, 583] == 0).all()
    for t in range(3):
        for b in range(7):
            block = kept[t, 64 * b : 64 * b + 64].float()
            byte = power(block.abs().max().item())
            assert data[t, 576 + b] == byte
            codes = (block / 2.0 ** (byte - 127)).to(torch.float8_e4m3fn)
            assert torch.equal(data[t, 64 * b : 64 * b + 64], codes.view(torch.uint8))
            expected = (codes.float() * 2.0 ** (byte - 127)).bfloat16()
            assert torch.equal(LATENT.decode(data, 512)[t, 64 * b : 64 * b + 64], expected)
    assert torch.equal(LATENT.decode(data, 512)[:, 448:], kept[:, 448:])


def test_c04_bytes_of_a_vector() -> None:
    """128 codes, then one float32 scale: 132."""
    x = rows(128, 5)
    data = VectorFP8().encode(x)
    assert data.shape == (5, 132) and VectorFP8().size(128) == 132
    kept = x.bfloat16().float()
    scales = torch.tensor([2.0 ** (power(row.abs().max().item()) - 127) for row in kept])
    assert torch.equal(data[:, 128:].contiguous().view(torch.float32)[:, 0], scales)
    codes = (kept / scales[:, None]).to(torch.float8_e4m3fn)
    assert torch.equal(data[:, :128], codes.view(torch.uint8))
    assert torch.equal(VectorFP8().decode(data, 128), codes.float() * scales[:, None])


@pytest.mark.parametrize(("record", "dim"), RECORDS, ids=IDS)
def test_c04_what_is_written_in_blocks_is_read_row_by_row(record: Any, dim: int) -> None:
    x = rows(dim, 3, 16)
    data = record.encode(x)
    assert data.shape == (3, 16, record.size(dim))
    back = record.decode(data, dim)
    assert back.shape == x.shape
    for block, row in ((0, 0), (1, 7), (2, 15)):
        assert torch.equal(record.decode(record.encode(x[block, row]), dim), back[block, row])
        assert torch.equal(record.decode(data[block, row], dim), back[block, row])
    transposed = data.transpose(0, 1)
    assert torch.equal(record.decode(transposed, dim), back.transpose(0, 1)), (
        "strides do not matter"
    )


@pytest.mark.parametrize(("record", "dim"), RECORDS, ids=IDS)
def test_a_kept_row_is_kept_again_unchanged(record: Any, dim: int) -> None:
    once = record.decode(record.encode(rows(dim, 40)), dim)
    assert torch.equal(record.decode(record.encode(once), dim), once)


@pytest.mark.parametrize(("record", "dim"), RECORDS, ids=IDS)
def test_c15_zero_rows(record: Any, dim: int) -> None:
    assert record.decode(record.encode(torch.zeros(2, dim)), dim).count_nonzero() == 0
    assert record.decode(record.encode(torch.zeros(0, dim)), dim).shape == (0, dim)


@pytest.mark.parametrize(("record", "dim"), RECORDS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_f18_the_gradient_passes_straight_through(
    record: Any, dim: int, dtype: torch.dtype
) -> None:
    x = rows(dim, 4).to(dtype).requires_grad_()
    out = round_trip(x, record)
    assert torch.equal(out, record.decode(record.encode(x.detach()), dim))
    upstream = torch.randn(4, dim).bfloat16()
    out.backward(upstream.to(out.dtype))
    assert x.grad is not None and torch.equal(x.grad, upstream.to(dtype))


@pytest.mark.parametrize(("dim", "rope"), [(96, 64), (512, 63), (65, 0)])
def test_unrotated_dims_come_in_whole_blocks(dim: int, rope: int) -> None:
    told = rf"head_dim {dim} - rope {rope} = {dim - rope} is not a multiple"
    with pytest.raises(ValueError, match=told):
        LatentFP8(rope).size(dim)


def test_bytes_of_a_row_with_a_wide_tail() -> None:
    """20 values in bfloat16, 4 in float32: 56 bytes. Nothing of the tail is rounded."""
    record = TailRecord(BFLOAT16_RECORD, 4)
    x = rows(24, 6)
    data = record.encode(x)
    assert data.dtype == torch.uint8 and data.shape == (6, 56) and record.size(24) == 56
    assert record.name == "bfloat16 and 4 float32"
    assert torch.equal(data[:, :40].contiguous().view(torch.bfloat16), x[:, :20].bfloat16())
    assert torch.equal(data[:, 40:].contiguous().view(torch.float32), x[:, 20:])
    back = record.decode(data, 24)
    assert back.dtype == torch.float32
    assert torch.equal(back, torch.cat((x[:, :20].bfloat16().float(), x[:, 20:]), -1))
    assert not torch.equal(back[:, :20], x[:, :20]), "the control"
    assert back[:, 20:].bfloat16().float().ne(x[:, 20:]).any()


def static_oracle(x: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and values of x / scale, one float32 division and one float32 product."""
    quotient = (x.float().numpy() / scales.numpy()).astype(np.float32)
    codes = torch.from_numpy(quotient).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, torch.from_numpy(codes.float().numpy() * scales.numpy())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_row_with_static_scales(dtype: torch.dtype) -> None:
    """One code a value; each channel has its own scale, which is not in the record."""
    record, dim = StaticFP8(), 40
    x, scales = rows(dim, 3, 16).to(dtype), torch.rand(dim) / 50 + 1e-3
    data = record.encode(x, scales)
    assert data.dtype == torch.uint8 and data.shape == (3, 16, 40) and record.size(dim) == 40
    codes, values = static_oracle(x, scales)
    assert torch.equal(data, codes.view(torch.uint8))
    back = record.decode(data, dim, scales)
    assert back.dtype == torch.float32 and torch.equal(back, values)
    for block, row in ((0, 0), (1, 7), (2, 15)):
        assert torch.equal(record.decode(data[block, row], dim, scales), back[block, row])
        assert torch.equal(record.encode(x[block, row], scales), data[block, row])
    assert torch.equal(record.decode(data.transpose(0, 1), dim, scales), back.transpose(0, 1))
    assert torch.equal(record.decode(record.encode(back, scales), dim, scales), back)
    assert not torch.equal(record.encode(x, scales.flip(0)), data), "the control"


def test_static_scales_saturate_and_keep_signs() -> None:
    scales = torch.tensor([0.5, 0.5, 2.0, 1.0, 1.0])
    x = torch.tensor([[1e6, -1e6, 897.0, -0.0, 2.0**-11]])
    back = StaticFP8().decode(StaticFP8().encode(x, scales), 5, scales)
    assert back.tolist() == [[224.0, -224.0, 896.0, 0.0, 0.0]]
    assert back.signbit().tolist() == [[False, True, False, True, False]]


def test_static_scales_the_gradient_passes_straight_through_F18() -> None:
    x, scales = rows(24, 4).requires_grad_(), torch.rand(24) / 50 + 1e-3
    out = round_trip(x, StaticFP8(), scales)
    assert torch.equal(out, static_oracle(x.detach(), scales)[1])
    upstream = torch.randn(4, 24)
    out.backward(upstream)
    assert x.grad is not None and torch.equal(x.grad, upstream)


def test_static_scales_are_needed() -> None:
    with pytest.raises(AssertionError, match="needs its scales"):
        StaticFP8().encode(torch.zeros(1, 4))
