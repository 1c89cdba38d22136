"""Number formats of weights: how a master becomes the bytes that the forward reads, and back.

One packing rule for every reader: packed = pack(bf16(master)), round to nearest even, whatever dtype the master has.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.formats.rounding import (
    AMAX_FLOOR,
    E4M3_MAX,
    ceil_power_of_two,
    exponent_value,
    fp8_scale_bytes,
    to_e4m3,
)

Packed = dict[str, Tensor]


class Format(Protocol):
    """A weight format. `pack` and `unpack` work on the last two dimensions; leading ones are stacks."""

    @property
    def name(self) -> str:
        """As config readers, errors and reports spell it."""

    @property
    def activation(self) -> torch.dtype:
        """dtype of what a linear with this weight returns, unless its caller asks for another."""

    @property
    def quantizes_input(self) -> bool:
        """Whether a linear with this weight quantises its input, per token and 128 channels."""

    def pack(self, master: Tensor) -> Packed:
        """The bytes that the forward reads."""

    def unpack(self, packed: Packed, shape: torch.Size) -> Tensor:
        """float32 values of the packed bytes, of the master's shape."""


@dataclass(frozen=True)
class Plain:
    """bfloat16 or float32: the values themselves."""

    name: str
    dtype: torch.dtype
    quantizes_input: bool = False

    @property
    def activation(self) -> torch.dtype:
        return self.dtype

    def pack(self, master: Tensor) -> Packed:
        return {"values": master.to(self.dtype)}

    def unpack(self, packed: Packed, shape: torch.Size) -> Tensor:
        return packed["values"].float()


@dataclass(frozen=True)
class BlockFP8:
    """e4m3 codes with one scale for each 128x128 block; edge blocks may be partial.

    scale = max(amax, 1e-10) / 448, rounded up to a power of two when `power_of_two` (ue8m0). The scale is rounded
    first; the codes are quantised with the rounded one. Tensors: codes uint8 (e4m3 bytes) [..., N, K], scales
    [..., ceil(N/128), ceil(K/128)], uint8 (e8m0) or float32.
    """

    name: str
    power_of_two: bool
    block: int = 128
    activation: torch.dtype = torch.bfloat16
    quantizes_input: bool = True

    def pack(self, master: Tensor) -> Packed:
        w = master.to(torch.bfloat16).float()
        blocks = _blocks(w, self.block)
        amax = blocks.abs().amax((-3, -1))
        if self.power_of_two:
            scales = fp8_scale_bytes(amax)
            values = exponent_value(scales)
        else:
            limit = torch.tensor(E4M3_MAX, dtype=torch.float32, device=w.device)
            values = scales = amax.clamp_min(AMAX_FLOOR) / limit
        codes = to_e4m3(w / spread(values, self.block, w.shape))
        return {"codes": codes.view(torch.uint8), "scales": scales}

    def scale_values(self, packed: Packed) -> Tensor:
        """float32 scales."""
        return exponent_value(packed["scales"]) if self.power_of_two else packed["scales"]

    def unpack(self, packed: Packed, shape: torch.Size) -> Tensor:
        codes = packed["codes"].view(torch.float8_e4m3fn).float()
        return codes * spread(self.scale_values(packed), self.block, codes.shape)


E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class MXFP4:
    """e2m1 codes, two to a byte, low nibble first; one e8m0 scale for each 32 values along K (OCP MX v1.0, 5.3).

    scale = 2^ceil(log2(max(amax, 1e-10) / 6)), so nothing saturates; codes round to nearest, ties to the even code.
    Tensors: codes uint8 [..., N, K/2], scales uint8 [..., N, K/32]. A linear reads the values in bf16 (exact) and
    does not quantise its input (W4A16, what Hopper samplers run).
    """

    name: str = "mxfp4"
    group: int = 32
    activation: torch.dtype = torch.bfloat16
    quantizes_input: bool = False

    def pack(self, master: Tensor) -> Packed:
        w = master.to(torch.bfloat16).float()
        if w.shape[-1] % self.group:
            raise ValueError(
                f"mxfp4 needs K a multiple of {self.group}, got a weight of shape {tuple(w.shape)}"
            )
        groups = w.unflatten(-1, (-1, self.group))
        limit = torch.tensor(E2M1[-1], dtype=torch.float32, device=w.device)
        scales = ceil_power_of_two(groups.abs().amax(-1).clamp_min(AMAX_FLOOR) / limit)
        codes = _e2m1_codes(groups / exponent_value(scales)[..., None]).flatten(-2)
        return {"codes": codes[..., 0::2] | (codes[..., 1::2] << 4), "scales": scales}

    def unpack(self, packed: Packed, shape: torch.Size) -> Tensor:
        pairs = packed["codes"]
        codes = torch.stack((pairs & 0xF, pairs >> 4), -1).flatten(-2)
        table = torch.tensor(
            E2M1 + tuple(-v for v in E2M1), dtype=torch.float32, device=pairs.device
        )
        groups: Tensor = table[codes.long()].unflatten(-1, (-1, self.group))
        return (groups * exponent_value(packed["scales"])[..., None]).flatten(-2)


PIECE = (
    1 << 24
)  # values packed at a time: a stack of experts would need several times its size at once


def pack_pieces(format: Format, master: Tensor) -> Packed:
    """`format.pack(master)`, a few matrices of a stack at a time; the same bytes, since each matrix packs alone."""
    if master.ndim < 3 or master.numel() <= PIECE:
        return format.pack(master)
    step = max(1, PIECE // max(1, master[0].numel()))
    packed: Packed = {}
    for start in range(0, len(master), step):
        for name, piece in format.pack(master[start : start + step]).items():
            if name not in packed:
                packed[name] = piece.new_empty((len(master), *piece.shape[1:]))
            packed[name][start : start + step] = piece
    return packed


def _e2m1_codes(x: Tensor) -> Tensor:
    """4-bit codes (sign bit 3) of float32 x with |x| <= 6; nearest, ties to the even code."""
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for i, (low, high) in enumerate(pairwise(E2M1)):
        middle = (low + high) / 2
        above = (
            magnitude >= middle if i % 2 else magnitude > middle
        )  # an odd lower code loses the tie
        code += above
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def _blocks(w: Tensor, size: int) -> Tensor:
    """[..., N, K] as [..., N/size, size, K/size, size], zero-filled at the edges."""
    n, k = w.shape[-2:]
    w = F.pad(w, (0, -k % size, 0, -n % size))
    blocks: Tensor = w.unflatten(-1, (-1, size)).unflatten(-3, (-1, size))
    return blocks


def spread(scales: Tensor, size: int, shape: torch.Size) -> Tensor:
    """One scale a block as one scale an element, cut to `shape`'s last two dimensions."""
    full = scales.repeat_interleave(size, -2).repeat_interleave(size, -1)
    return full[..., : shape[-2], : shape[-1]]


BFLOAT16 = Plain("bfloat16", torch.bfloat16)
FLOAT32 = Plain("float32", torch.float32)
FP8_UE8M0 = BlockFP8("fp8_ue8m0", power_of_two=True)
FP8_FLOAT32 = BlockFP8("fp8_float32", power_of_two=False)
FP4 = MXFP4()

_ALL: tuple[Format, ...] = (BFLOAT16, FLOAT32, FP8_UE8M0, FP8_FLOAT32, FP4)
FORMATS = {format.name: format for format in _ALL}


FAMILIES = {"fp8": ("fp8_ue8m0", "fp8_float32")}
"""Names that leave a choice to the file: its scales say which member it is. The first is the default."""


def accepts(declared: str | None, name: str) -> bool:
    """Whether a weight declared so may be held in format `name`; None accepts every format."""
    return declared is None or name in FAMILIES.get(declared, (declared,))


def find(name: str) -> Format:
    """The weight format of that name, or a family's default; ValueError names the known ones."""
    name = FAMILIES.get(name, (name,))[0]
    if name not in FORMATS:
        raise ValueError(f"unknown weight format {name!r}; known: {', '.join(sorted(FORMATS))}")
    return FORMATS[name]
