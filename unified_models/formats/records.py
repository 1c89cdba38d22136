"""Records: the bytes in which a slot keeps one row between steps. Training makes the same round trip."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.formats.activations import RoundTrip
from unified_models.formats.rounding import (
    exponent_value,
    fp8_scale_bytes,
    fp8_scales,
    to_e4m3,
)


class Record(Protocol):
    """How a row of `dim` values is stored. Rows are independent of each other."""

    @property
    def name(self) -> str:
        """As reports spell it."""

    def size(self, dim: int) -> int:
        """Bytes of one row."""

    def encode(self, rows: Tensor, scales: Tensor | None = None) -> Tensor:
        """[..., dim] to uint8 [..., size(dim)]. scales: float32 [dim], of records that have static ones."""

    def decode(self, data: Tensor, dim: int, scales: Tensor | None = None) -> Tensor:
        """uint8 [..., size(dim)] to [..., dim] in the dtype that the forward reads."""


@dataclass(frozen=True)
class PlainRecord:
    """The row itself, in one dtype."""

    name: str
    dtype: torch.dtype

    def size(self, dim: int) -> int:
        return dim * self.dtype.itemsize

    def encode(self, rows: Tensor, scales: Tensor | None = None) -> Tensor:
        return rows.to(self.dtype).contiguous().view(torch.uint8)

    def decode(self, data: Tensor, dim: int, scales: Tensor | None = None) -> Tensor:
        return seen_as(data, self.dtype)


@dataclass(frozen=True)
class TailRecord:
    """All but the last `wide` values in `most`, those in float32. Decodes to float32."""

    most: PlainRecord
    wide: int

    @property
    def name(self) -> str:
        return f"{self.most.name} and {self.wide} float32"

    def size(self, dim: int) -> int:
        return self.most.size(dim - self.wide) + 4 * self.wide

    def encode(self, rows: Tensor, scales: Tensor | None = None) -> Tensor:
        head, tail = rows[..., : -self.wide], rows[..., -self.wide :]
        return torch.cat((self.most.encode(head), FLOAT32_RECORD.encode(tail)), -1)

    def decode(self, data: Tensor, dim: int, scales: Tensor | None = None) -> Tensor:
        head, tail = data[..., : -4 * self.wide], data[..., -4 * self.wide :]
        values = self.most.decode(head, dim - self.wide).float()
        return torch.cat((values, FLOAT32_RECORD.decode(tail, self.wide)), -1)


@dataclass(frozen=True)
class StaticFP8:
    """e4m3 codes of value / scale, with one scale a channel that a checkpoint brings: keys and values of ModelOpt's
    FP8 caches. Decodes to float32 code * scale."""

    name: str = "static_fp8"

    def size(self, dim: int) -> int:
        return dim

    def encode(self, rows: Tensor, scales: Tensor | None = None) -> Tensor:
        assert scales is not None, "a static FP8 record needs its scales"
        return to_e4m3(rows.float() / scales).view(torch.uint8)

    def decode(self, data: Tensor, dim: int, scales: Tensor | None = None) -> Tensor:
        assert scales is not None, "a static FP8 record needs its scales"
        values: Tensor = data.contiguous().view(torch.float8_e4m3fn).float()
        return values * scales


@dataclass(frozen=True)
class LatentFP8:
    """A latent key/value row: e4m3 in 64-blocks for the unrotated dims, bf16 for the `rope` last dims.

    Layout: dim - rope codes, 2 * rope bytes of bf16, one e8m0 scale a block, one pad byte; 584 bytes at 512 + 64.
    The row is rounded to bf16 first. scale = 2^ceil(log2(max(amax, 1e-10) / 448)).
    """

    rope: int
    name: str = "latent_fp8"
    block: int = 64

    def size(self, dim: int) -> int:
        nope = dim - self.rope
        if nope % self.block:
            raise ValueError(
                f"a latent FP8 record keeps head_dim - rope dims in blocks of {self.block}; "
                f"head_dim {dim} - rope {self.rope} = {nope} is not a multiple"
            )
        return nope + 2 * self.rope + nope // self.block + 1

    def encode(self, rows: Tensor, scales: Tensor | None = None) -> Tensor:
        nope = rows.shape[-1] - self.rope
        values = rows.to(torch.bfloat16)
        blocks = values[..., :nope].float().unflatten(-1, (-1, self.block))
        scales = fp8_scale_bytes(blocks.abs().amax(-1))
        codes = to_e4m3(blocks / exponent_value(scales)[..., None]).flatten(-2)
        rope = values[..., nope:].contiguous().view(torch.uint8)
        return torch.cat(
            (codes.view(torch.uint8), rope, scales, torch.zeros_like(scales[..., :1])), -1
        )

    def decode(self, data: Tensor, dim: int, scales: Tensor | None = None) -> Tensor:
        nope = dim - self.rope
        codes, rope, scales, _ = data.split((nope, 2 * self.rope, nope // self.block, 1), -1)
        blocks = (
            codes.contiguous().view(torch.float8_e4m3fn).float().unflatten(-1, (-1, self.block))
        )
        values = (blocks * exponent_value(scales)[..., None]).flatten(-2).to(torch.bfloat16)
        return torch.cat((values, seen_as(rope, torch.bfloat16)), -1)


@dataclass(frozen=True)
class VectorFP8:
    """An indexer key: e4m3 with one power-of-two scale for the whole vector, kept as float32; dim + 4 bytes.

    The row is rounded to bf16 first. Decodes to float32 code * scale (exact: the scale is a power of two).
    """

    name: str = "vector_fp8"

    def size(self, dim: int) -> int:
        return dim + 4

    def encode(self, rows: Tensor, scales: Tensor | None = None) -> Tensor:
        values = rows.to(torch.bfloat16).float()
        scales = fp8_scales(values.abs().amax(-1))[..., None]
        codes = to_e4m3(values / scales)
        return torch.cat((codes.view(torch.uint8), scales.view(torch.uint8)), -1)

    def decode(self, data: Tensor, dim: int, scales: Tensor | None = None) -> Tensor:
        codes, scales = data.split((dim, 4), -1)
        values: Tensor = codes.contiguous().view(torch.float8_e4m3fn).float()
        row: Tensor = values * seen_as(scales, torch.float32)
        return row


def seen_as(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes as values of a wider dtype, wherever they start."""
    if not data.numel():
        return data.new_empty((*data.shape[:-1], data.shape[-1] // dtype.itemsize), dtype=dtype)
    shape = (*data.shape[:-1], data.shape[-1] // dtype.itemsize)
    data = (
        data.contiguous().flatten()
    )  # a single row may keep a stride of its own, which a view would ask about
    aligned = data.storage_offset() % dtype.itemsize == 0
    return (data if aligned else data.clone()).view(dtype).view(shape)


FLOAT32_RECORD = PlainRecord("float32", torch.float32)
BFLOAT16_RECORD = PlainRecord("bfloat16", torch.bfloat16)


def round_trip(rows: Tensor, record: Record, scales: Tensor | None = None) -> Tensor:
    """What a reader gets back for `rows`; the gradient passes straight through."""
    if isinstance(record, PlainRecord) and rows.dtype == record.dtype:
        return rows
    with torch.no_grad():
        kept = record.decode(record.encode(rows, scales), rows.shape[-1], scales)
    return apply(RoundTrip, rows, kept)
