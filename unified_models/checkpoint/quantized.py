"""How a number format lies in a file: a plain tensor, or codes, and scales beside them.

    format        X.weight                  X.scale (or X.weight_scale_inv)
    bfloat16      BF16, F16 or F32 [N, K]   -
    float32       F32, BF16 or F16 [N, K]   -
    fp8_ue8m0     F8_E4M3 [N, K]            F8_E8M0 (or U8) [ceil(N/128), ceil(K/128)]
    fp8_float32   F8_E4M3 [N, K]            F32 [ceil(N/128), ceil(K/128)]
    mxfp4         I8 (or U8) [N, K/2]       F8_E8M0 (or U8) [N, K/32]

                                            X.weight_scale         X.weight_scale_2   X.input_scale
    fp8_tensor    F8_E4M3 [N, K]            F32 []                 -                  F32 []
    nvfp4         U8 (or I8) [N, K/2]       F8_E4M3 [N, K/16]      F32 []             -

[] may be [1]. The kind is decided by names, dtypes and shapes, never by config.json: a file may hold several kinds.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from unified_models.checkpoint.shards import DTYPE_NAMES, Pending, Stored
from unified_models.formats import Format, Packed
from unified_models.weight import check_scales

PLAIN = ("F32", "BF16", "F16")
PLAIN_FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CODES = ("F8_E4M3", "I8", "U8")
BLOCK_SCALE = ("scale", "weight_scale_inv")
"""What is beside codes in blocks: as official files call it, then as some exporters do."""
SCALE, GLOBAL = "weight_scale", "weight_scale_2"


@dataclass(frozen=True)
class Scale:
    """A tensor of scales beside the codes of X: X.<names[0]> is written, the others are read, too.

    One scale for `rows` x `columns` values, edge blocks may be partial; 0: one for the whole matrix. zero: a scale may
    be 0, as ModelOpt before 0.30 left the scales of tiny blocks.
    """

    names: tuple[str, ...]
    dtype: torch.dtype
    rows: int = 0
    columns: int = 0
    zero: bool = False

    def shape(self, n: int, k: int) -> torch.Size:
        """Of a matrix [n, k]."""
        return torch.Size((-(-n // self.rows), -(-k // self.columns)) if self.rows else ())


@dataclass(frozen=True)
class Layout:
    """Codes and scales of a format in a file; scales by their names in `Packed`, the finest first."""

    codes: torch.dtype
    scales: Mapping[str, Scale]
    codes_per_byte: int = 1

    def block(self, n: int, k: int) -> tuple[int, int]:
        """Rows and columns of the values that share a scale."""
        finest = next(iter(self.scales.values()))
        return (finest.rows, finest.columns) if finest.rows else (n, k)


_NVFP4 = Layout(
    torch.uint8,
    {
        "scales": Scale((SCALE,), torch.float8_e4m3fn, 1, 16, zero=True),
        "global": Scale((GLOBAL,), torch.float32),
    },
    codes_per_byte=2,
)
LAYOUTS = {
    "fp8_ue8m0": Layout(
        torch.float8_e4m3fn, {"scales": Scale(BLOCK_SCALE, torch.float8_e8m0fnu, 128, 128)}
    ),
    "fp8_float32": Layout(
        torch.float8_e4m3fn, {"scales": Scale(BLOCK_SCALE, torch.float32, 128, 128)}
    ),
    "fp8_tensor": Layout(torch.float8_e4m3fn, {"scale": Scale((SCALE,), torch.float32)}),
    "mxfp4": Layout(
        torch.int8, {"scales": Scale(BLOCK_SCALE, torch.float8_e8m0fnu, 1, 32)}, codes_per_byte=2
    ),
    "nvfp4": _NVFP4,
    "nvfp4_four_over_six": _NVFP4,
}


def base(name: str) -> str:
    """X of X.weight."""
    return name.removesuffix(".weight")


def beside(name: str, tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """The scales that a file holds beside the weight `name`, by what comes after "X."."""
    named = {suffix: f"{base(name)}.{suffix}" for suffix in (*BLOCK_SCALE, SCALE, GLOBAL)}
    return {suffix: tensors[scale] for suffix, scale in named.items() if scale in tensors}


def recognise(
    weight: Stored, scales: Mapping[str, Stored], shape: torch.Size, declared: str | None
) -> tuple[str, dict[str, Stored]]:
    """The name of the format in which a file holds a matrix, and its scales by their names in `Packed`.

    scales: what is `beside` it. "nvfp4" stands for both rules of that family. Raises ValueError naming tensors and
    both values: shapes, dtypes, a scale that is missing or scales nothing.
    """
    if weight.dtype in PLAIN:
        expect(weight, tuple(shape))
        for stray in scales.values():
            raise ValueError(f"{stray.name} scales nothing: {weight.name} is {weight.dtype}")
        return ("float32" if declared == "float32" else "bfloat16"), {}
    if weight.dtype not in CODES:
        raise ValueError(f"{weight.name} is {weight.dtype}, not a dtype of weights")
    if len(shape) != 2:
        raise ValueError(f"{weight.name} is {weight.dtype}, expected plain values {tuple(shape)}")
    kind = _kind(weight, scales)
    (n, k), layout = shape, LAYOUTS[kind]
    expect(weight, (n, k // layout.codes_per_byte))
    columns = layout.block(n, k)[1]
    if layout.codes_per_byte > 1 and k % columns:
        raise ValueError(f"{weight.name}: {kind} needs K a multiple of {columns}, it is {(n, k)}")
    found = {}
    for piece, scale in layout.scales.items():
        stored = next((scales[name] for name in scale.names if name in scales), None)
        if stored is None:
            told = f"{base(weight.name)}.{scale.names[0]} is missing"
            raise ValueError(f"{weight.name} is {weight.dtype} and its scale is missing: {told}")
        bytes_too = ("U8",) if scale.dtype == torch.float8_e8m0fnu else ()
        if stored.dtype not in (DTYPE_NAMES[scale.dtype], *bytes_too):
            raise ValueError(
                f"{stored.name} is {stored.dtype}, expected {DTYPE_NAMES[scale.dtype]} "
                f"for {weight.dtype} codes"
            )
        expect(stored, tuple(scale.shape(n, k)))
        found[piece] = stored
    for stray in scales.values():
        if stray not in found.values():
            raise ValueError(f"{stray.name} scales nothing: {weight.name} is {kind}")
    return kind, found


def _kind(weight: Stored, scales: Mapping[str, Stored]) -> str:
    """Which layout these codes have, by the names of their scales."""
    blocks = [scales[name] for name in BLOCK_SCALE if name in scales]
    whole = [scales[name] for name in (SCALE, GLOBAL) if name in scales]
    if not blocks and not whole:
        names = " nor ".join(f"{base(weight.name)}.{name}" for name in (*BLOCK_SCALE, SCALE))
        raise ValueError(
            f"{weight.name} is {weight.dtype} and its scale is missing: neither {names} is there"
        )
    if len(blocks) + bool(whole) > 1:
        both = " and ".join(scale.name for scale in (*blocks, *whole))
        raise ValueError(f"{both} are both there: {weight.name} has scales of one kind")
    if whole:
        return "fp8_tensor" if weight.dtype == "F8_E4M3" else "nvfp4"
    if weight.dtype != "F8_E4M3":
        return "mxfp4"
    return "fp8_float32" if blocks[0].dtype == "F32" else "fp8_ue8m0"


def expect(stored: Stored, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a tensor has this shape; a single number may have the shape [1]."""
    if stored.shape != shape and (shape or stored.shape != (1,)):
        raise ValueError(f"{stored.name} is {stored.dtype} {stored.shape}, expected {shape}")


def to_packed(layout: Layout, codes: Tensor, scales: Mapping[str, tuple[str, Tensor]]) -> Packed:
    """A file's own codes and scales, as formats pack them. scales: by their names in `Packed`, with their tensor's.

    Raises ValueError naming the tensor and the first scale that is not a finite number above 0 (or 0, where it may).
    """
    packed = {"codes": codes.view(torch.uint8)}
    for piece, (name, scale) in scales.items():
        expected = layout.scales[piece]
        values = scale.view(expected.dtype)  # an e8m0 scale may come as bytes
        check_scales(values, name, zero=expected.zero)
        values = values if expected.rows else values.reshape(())
        packed[piece] = values if values.dtype == torch.float32 else values.view(torch.uint8)
    return packed


def pending(
    name: str, format: Format, shape: torch.Size, packed: Callable[[], Packed]
) -> Iterator[Pending]:
    """The tensors that a file holds for a matrix, under official names; `packed()` is asked as each is written."""
    if format.name in PLAIN_FORMATS:
        yield Pending(name, PLAIN_FORMATS[format.name], shape, lambda: packed()["values"])
        return
    assert format.name in LAYOUTS, f"{name}: no file layout for {format.name}"
    layout, (n, k) = LAYOUTS[format.name], shape

    def piece(key: str, dtype: torch.dtype) -> Callable[[], Tensor]:
        return lambda: packed()[key].view(dtype)

    codes = torch.Size((n, k // layout.codes_per_byte))
    yield Pending(name, layout.codes, codes, piece("codes", layout.codes))
    for key, scale in layout.scales.items():
        scale_name = f"{base(name)}.{scale.names[0]}"
        yield Pending(scale_name, scale.dtype, scale.shape(n, k), piece(key, scale.dtype))
