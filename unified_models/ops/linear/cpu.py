"""Matrix products whose rows have the same bits wherever they stand and whoever their neighbours are.

Every product runs on tiles of 16 rows, zero-filled, over a weight of [N, K] storage with N padded to a multiple of
16 and K whole (or cut into its 128-blocks, for FP8). MKL orders a tile's sums by the tile's shape, and the shape is
always the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.formats.activations import GROUP, quantize_rows
from unified_models.formats.weights import BlockFP8, spread
from unified_models.weight import Reading

TILE = 16


def tiled_mm(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x @ w.T in float32 by 16-row tiles. x: float32 [T, K]; w: float32 [N, K], N a multiple of 16."""
    T, K = x_TK.shape
    N = len(w_NK)
    if T == 0:
        return x_TK.new_empty(0, N)
    tiles = -(-T // TILE)
    rows = F.pad(x_TK, (0, 0, 0, -T % TILE)) if T % TILE else x_TK.contiguous()
    if rows.data_ptr() % 64:
        rows = rows.clone()
    return torch.bmm(rows.view(tiles, TILE, K), w_NK.t().expand(tiles, K, N)).view(tiles * TILE, N)[
        :T
    ]


@dataclass(frozen=True)
class Operand:
    """A weight as the tiles read it: a stack of matrices, and for FP8 one scale a row and 128-block of K.

    w: [G, N', K] float32; FP8: codes [G, K'/128, N', 128]. scales: None or [G, K'/128, N'].
    """

    w: Tensor
    scales: Tensor | None
    N: int


def operand(reading: Reading) -> Operand:
    """The tiles' form of a weight of shape [N, K], [groups * N, K] or [E, N, K]."""
    fmt, shape = reading.format, reading.shape
    stack = reading.weight.groups if len(shape) == 2 else shape[0]
    N = shape[-2] // stack if len(shape) == 2 else shape[-2]
    pad_n = -N % TILE
    if not isinstance(fmt, BlockFP8):
        w = reading.dequantized().view(stack, N, shape[-1])
        return Operand(F.pad(w, (0, 0, 0, pad_n)).contiguous(), None, N)
    codes = reading.packed["codes"].view(torch.float8_e4m3fn).float().view(stack, N, -1)
    codes = F.pad(codes, (0, -shape[-1] % GROUP, 0, pad_n)).unflatten(-1, (-1, GROUP))
    scales = fmt.scale_values(reading.packed)
    rows = spread(scales, fmt.block, torch.Size((*shape[:-1], scales.shape[-1] * fmt.block)))[
        ..., :: fmt.block
    ]
    rows = F.pad(rows.reshape(stack, N, -1), (0, 0, 0, pad_n))
    return Operand(codes.transpose(1, 2).contiguous(), rows.transpose(1, 2).contiguous(), N)


@dataclass(frozen=True)
class Input:
    """Rows as the tiles read them: plain float32 [..., K], or e4m3 code values and a scale for each 128 of K."""

    x: Tensor
    scales: Tensor | None

    def rows(self, index: slice | Tensor) -> "Input":
        return Input(self.x[index], None if self.scales is None else self.scales[index])


def prepare(x: Tensor, *, quantize: bool) -> Input:
    """x: [..., K] of any float dtype."""
    return Input(*quantize_rows(x)) if quantize else Input(x.float(), None)


def inputs(x: Tensor, readings: Sequence[Reading]) -> list[Input]:
    """x as each weight's product reads it; quantised once for all that ask for it."""
    made: dict[bool, Input] = {}
    for reading in readings:
        quantize = reading.format.quantizes_input
        if quantize not in made:
            made[quantize] = prepare(x.detach(), quantize=quantize)
    return [made[reading.format.quantizes_input] for reading in readings]


def product(rows: Input, w: Operand, g: int) -> Tensor:
    """rows @ w[g].T, float32 [T, N]. FP8: each 128-block's product of codes is scaled, then added in block order."""
    if w.scales is None or rows.scales is None:
        return tiled_mm(rows.x, w.w[g])[:, : w.N]
    total: Tensor | None = None
    for b in range(w.w.shape[1]):
        part = tiled_mm(rows.x[:, b * GROUP : (b + 1) * GROUP], w.w[g, b])
        part = part * (rows.scales[:, b, None] * w.scales[g, b])
        total = part if total is None else total + part
    assert total is not None
    return total[:, : w.N]
