"""Number formats of weights: how a master becomes the bytes that the forward reads, and back.

One packing rule for every reader: packed = pack(bf16(master)), round to nearest even, whatever dtype the master has.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.formats.fp4 import MXFP4, NVFP4
from unified_models.formats.kinds import Format, Input, Packed
from unified_models.formats.rounding import (
    AMAX_FLOOR,
    E4M3_MAX,
    exponent_value,
    fp8_scale_bytes,
    to_e4m3,
)


@dataclass(frozen=True)
class Plain:
    """bfloat16 or float32: the values themselves."""

    name: str
    dtype: torch.dtype
    input: Input = "plain"

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
    input: Input = "dynamic"

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


@dataclass(frozen=True)
class TensorFP8:
    """e4m3 codes with one float32 scale for each matrix, max(amax, 1e-10) / 448; the input has one scale, too.

    ModelOpt's FP8. Tensors: codes uint8 (e4m3 bytes) [..., N, K], scale float32 [...]. The scale of the input is not
    packed from the master: it is `Weight.input_scale`, as calibration left it.
    """

    name: str = "fp8_tensor"
    activation: torch.dtype = torch.bfloat16
    input: Input = "static"

    def pack(self, master: Tensor) -> Packed:
        w = master.to(torch.bfloat16).float()
        limit = torch.tensor(E4M3_MAX, dtype=torch.float32, device=w.device)
        scale = w.abs().amax((-2, -1)).clamp_min(AMAX_FLOOR) / limit
        codes = to_e4m3(w / scale[..., None, None])
        return {"codes": codes.view(torch.uint8), "scale": scale}

    def unpack(self, packed: Packed, shape: torch.Size) -> Tensor:
        codes = packed["codes"].view(torch.float8_e4m3fn).float()
        return codes * packed["scale"][..., None, None]


PIECE = 1 << 24
"""values packed at a time: a stack of experts would need several times its size at once"""


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
FP8_TENSOR = TensorFP8()

_ALL: tuple[Format, ...] = (
    BFLOAT16,
    FLOAT32,
    FP8_UE8M0,
    FP8_FLOAT32,
    FP8_TENSOR,
    MXFP4(),
    NVFP4("nvfp4", largest_scale=448),
    NVFP4("nvfp4_four_over_six", largest_scale=256),
)
FORMATS = {format.name: format for format in _ALL}


FAMILIES = {
    "fp8": ("fp8_ue8m0", "fp8_float32"),
    "nvfp4": ("nvfp4", "nvfp4_four_over_six"),
}
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
