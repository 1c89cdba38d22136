"""Matrix products whose rows have the same bits wherever they stand and whoever their neighbours are.

Every product runs on tiles of 16 rows, zero-filled, over a weight of [N, K] storage with N padded to a multiple of
16 and K whole (or cut into its 128-blocks, for FP8). MKL orders a tile's sums by the tile's shape, and the shape is
always the same. On a GPU `narrow` multiplies.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.formats.activations import GROUP, quantize_rows, static_codes
from unified_models.formats.fp4 import NVFP4
from unified_models.formats.weights import BlockFP8, TensorFP8, spread
from unified_models.ops.linear import narrow
from unified_models.ops.products import bmm
from unified_models.weight import Reading

TILE = 16


def tiled_mm(x_TK: Tensor, w_NK: Tensor) -> Tensor:
    """x @ w.T in float32 by 16-row tiles. x: float32 [T, K]; w: float32 [N, K], N a multiple of 16."""
    T, K = x_TK.shape
    N = len(w_NK)
    if T == 0:
        return x_TK.new_empty(0, N)
    if x_TK.is_cuda:
        return bmm(x_TK[None], w_NK.t()[None])[0]
    # Fewer tiles than threads, and MKL would let threads share a tile's sum (ops/products.py).
    tiles = max(-(-T // TILE), torch.get_num_threads())
    missing = tiles * TILE - T
    rows = F.pad(x_TK, (0, 0, 0, missing)) if missing else x_TK.contiguous()
    if rows.data_ptr() % 64:
        rows = rows.clone()
    stack = (rows.view(tiles, TILE, K), w_NK.t().expand(tiles, K, N))
    return torch.bmm(*stack).view(tiles * TILE, N)[:T]  # on CPU


@dataclass(frozen=True)
class Operand:
    """A weight as the tiles read it: a stack of matrices, and what scales their products.

    w: [G, N', K] float32; block FP8: codes [G, K'/128, N', 128]. scales: None or, of block FP8, [G, K'/128, N']. On a
    GPU w is [G, N, K'] of `narrow`'s dtypes, and scales [G, N, K'/128], or of the blocks, [G, N/128, K'/128], of
    experts and where DeepGEMM multiplies.
    outer: None or [G], applied to the whole sum: per-tensor FP8's two scales, NVFP4's global one.
    """

    w: Tensor
    scales: Tensor | None
    outer: Tensor | None
    N: int


def operand(reading: Reading) -> Operand:
    """The tiles' form of a weight of shape [N, K], [groups * N, K] or [E, N, K]."""
    fmt, shape = reading.format, reading.shape
    stack, N = stacked(reading)
    pad_n = -N % TILE
    on_gpu = next(iter(reading.packed.values())).is_cuda
    if isinstance(fmt, BlockFP8):
        if not on_gpu:
            return block_operand(reading, fmt, stack, N)
        if len(shape) == 3:
            return block_bytes(reading)
        return Operand(*narrow.block_codes(reading, fmt, stack, N), None, N)
    if on_gpu:
        w = narrow.values(reading).reshape(stack, N, shape[-1])
    else:
        w = F.pad(values(reading).view(stack, N, shape[-1]), (0, 0, 0, pad_n)).contiguous()
    outer = outer_scale(reading)
    return Operand(w, None, None if outer is None else outer.expand(stack).clone(), N)


def block_bytes(reading: Reading) -> Operand:
    """The form of a weight of experts, and of one that DeepGEMM takes: its bytes, and its scales as they are."""
    fmt, (stack, N) = reading.format, stacked(reading)
    assert isinstance(fmt, BlockFP8)
    return Operand(*narrow.block_bytes(reading, fmt, stack, N), None, N)


def stacked(reading: Reading) -> tuple[int, int]:
    """How many matrices a weight of shape [N, K], [groups * N, K] or [E, N, K] holds, and N."""
    shape, groups = reading.shape, reading.weight.groups
    return (groups, shape[0] // groups) if len(shape) == 2 else (shape[0], shape[1])


def values(reading: Reading) -> Tensor:
    """float32 values of a weight without block scales, an outer scale left out, in the shape of the weight."""
    if isinstance(reading.format, TensorFP8):
        return reading.packed["codes"].view(torch.float8_e4m3fn).float()
    if isinstance(reading.format, NVFP4):
        return reading.format.scaled_codes(reading.packed)
    return reading.dequantized()


def outer_scale(reading: Reading) -> Tensor | None:
    """What multiplies the whole sum, [] or [G]."""
    if isinstance(reading.format, TensorFP8):
        return reading.packed["scale"] * reading.input_scale
    return reading.packed["global"] if isinstance(reading.format, NVFP4) else None


def block_operand(reading: Reading, fmt: BlockFP8, stack: int, N: int) -> Operand:
    """Codes cut into their 128-blocks of K, and a scale for each row and block."""
    shape, pad_n = reading.shape, -N % TILE
    codes = reading.packed["codes"].view(torch.float8_e4m3fn).float().view(stack, N, -1)
    codes = F.pad(codes, (0, -shape[-1] % GROUP, 0, pad_n)).unflatten(-1, (-1, GROUP))
    scales = fmt.scale_values(reading.packed)
    rows = spread(scales, fmt.block, torch.Size((*shape[:-1], scales.shape[-1] * fmt.block)))[
        ..., :: fmt.block
    ]
    rows = F.pad(rows.reshape(stack, N, -1), (0, 0, 0, pad_n))
    return Operand(codes.transpose(1, 2).contiguous(), rows.transpose(1, 2).contiguous(), None, N)


@dataclass(frozen=True)
class Input:
    """Rows as the tiles read them: float32 [..., K], values or e4m3 code values, and a scale for each 128 of K if the
    codes have one. On a GPU bfloat16 where that is exact: codes, and values that came so; an expert's codes float16,
    which bytes become in fewer instructions; bytes for DeepGEMM."""

    x: Tensor
    scales: Tensor | None

    @property
    def bytes(self) -> bool:
        """Whether they are DeepGEMM's."""
        return self.x.dtype == torch.float8_e4m3fn

    def rows(self, index: slice | tuple[slice, int]) -> "Input":
        return Input(self.x[index], None if self.scales is None else self.scales[index])


def prepare(
    x: Tensor,
    reading: Reading,
    counts_E: Sequence[int] | Tensor | None = None,
    as_bytes: bool = False,
) -> Input:
    """x as the weight's product reads it: [..., K] of any float dtype. counts_E: rows of each matrix of a stack, if x
    is sorted by them. as_bytes: as DeepGEMM reads it."""
    if reading.format.input == "dynamic":
        if x.is_cuda:
            from unified_models.ops import quantize_triton

            dtype = torch.bfloat16 if counts_E is None else torch.float16
            dtype = torch.float8_e4m3fn if as_bytes else dtype
            return Input(*quantize_triton.quantize_rows(x, dtype, tokens_last=as_bytes))
        return Input(*quantize_rows(x))
    if reading.format.input == "plain":
        return Input(x if x.is_cuda and x.dtype == torch.bfloat16 else x.float(), None)
    scale = reading.input_scale
    if counts_E is not None:
        if not isinstance(counts_E, Tensor):
            counts_E = torch.tensor(counts_E, dtype=torch.int64, device=x.device)
        scale = scale.repeat_interleave(counts_E, output_size=len(x))[:, None]
    if x.is_cuda:
        from unified_models.ops import quantize_triton

        dtype = torch.bfloat16 if counts_E is None else torch.float16
        return Input(quantize_triton.static_codes(x, scale, dtype), None)
    return Input(static_codes(x, scale), None)


def inputs(
    x: Tensor,
    readings: Sequence[Reading],
    counts_E: Sequence[int] | Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> list[Input]:
    """x as each weight's product reads it; prepared once for all that see it alike. dtype: of the products, if it is
    not that of the weight's activations."""
    made: dict[tuple[str, bool], Input] = {}
    outs = []
    for reading in readings:
        as_bytes = narrow.takes_bytes(reading, dtype or reading.format.activation)
        kind = (reading.format.input, as_bytes)
        if kind[0] == "static" or kind not in made:  # a static scale is the weight's own
            made[kind] = prepare(x.detach(), reading, counts_E, as_bytes)
        outs.append(made[kind])
    return outs


def products(rows: Input, reading: Reading, dtype: torch.dtype) -> Tensor:
    """rows @ w.T of a matrix, [T, N], or of each of its groups, [T, groups, N], rounded once to `dtype`."""
    if rows.bytes:
        assert rows.scales is not None
        bytes_ = reading.operand(block_bytes)
        return narrow.deep_scaled_product(rows.x, rows.scales, bytes_.w, bytes_.scales)
    w, groups = reading.operand(operand), reading.weight.groups
    if groups == 1:
        return product(rows, w, 0, dtype)
    parts = (rows.rows((slice(None), g)) for g in range(groups))
    return torch.stack([product(part, w, g, dtype) for g, part in enumerate(parts)], 1)


def product(rows: Input, w: Operand, g: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """rows @ w[g].T, [T, N]: float32 sums, rounded once to `dtype`. Block FP8: each 128-block's product of codes is
    scaled, then added in block order. An outer scale multiplies the sum."""
    if w.scales is None or rows.scales is None:
        if w.outer is not None:
            plain = Operand(w.w, None, None, w.N)
            return (product(rows, plain, g) * w.outer[g]).to(dtype)
        if rows.x.is_cuda:
            return narrow.product(rows.x, w.w[g], dtype)
        return tiled_mm(rows.x, w.w[g])[:, : w.N].to(dtype)
    if rows.x.is_cuda:
        return narrow.scaled_product(rows.x, rows.scales, w.w[g], w.scales[g], dtype)
    total: Tensor | None = None
    for b in range(w.w.shape[1]):
        part = tiled_mm(rows.x[:, b * GROUP : (b + 1) * GROUP], w.w[g, b])
        part = part * (rows.scales[:, b, None] * w.scales[g, b])
        total = part if total is None else total + part
    assert total is not None
    return total[:, : w.N].to(dtype)
