"""How a number format lies in a file: a plain tensor, or codes and scales under two names.

    format        X.weight                      X.scale
    bfloat16      BF16, F16 or F32 [N, K]       -
    float32       F32, BF16 or F16 [N, K]       -
    fp8_ue8m0     F8_E4M3 [N, K]                F8_E8M0 (or U8) [ceil(N/128), ceil(K/128)]
    fp8_float32   F8_E4M3 [N, K]                F32 [ceil(N/128), ceil(K/128)]
    mxfp4         I8 (or U8) [N, K/2]           F8_E8M0 (or U8) [N, K/32]

The kind is decided by dtypes and the scale's shape, never by config.json: a file may hold several kinds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unified_models.checkpoint.shards import Pending, Stored
from unified_models.formats import Format, Packed

PLAIN = ("F32", "BF16", "F16")
PLAIN_FORMATS = {"bfloat16": torch.bfloat16, "float32": torch.float32}
E8M0_NAN = 255


@dataclass(frozen=True)
class Layout:
    """Codes and scales of a format in a file. One scale for `rows` x `columns` values."""

    codes: torch.dtype
    scales: torch.dtype
    rows: int
    columns: int
    codes_per_byte: int = 1

    @property
    def power_of_two(self) -> bool:
        """Whether scales change no mantissa: then packing keeps values that were packed before."""
        return self.scales == torch.float8_e8m0fnu

    def scale_shape(self, n: int, k: int) -> torch.Size:
        """Of a matrix [n, k]; blocks at the edges may be partial."""
        return torch.Size((-(-n // self.rows), -(-k // self.columns)))


LAYOUTS = {
    "fp8_ue8m0": Layout(torch.float8_e4m3fn, torch.float8_e8m0fnu, 128, 128),
    "fp8_float32": Layout(torch.float8_e4m3fn, torch.float32, 128, 128),
    "mxfp4": Layout(torch.int8, torch.float8_e8m0fnu, 1, 32, codes_per_byte=2),
}


def scale_names(name: str) -> tuple[str, str]:
    """What the scale of tensor `name` is called: official, then as some exporters write it."""
    base = name.removesuffix(".weight")
    return f"{base}.scale", f"{base}.weight_scale_inv"


def recognise(weight: Stored, scale: Stored | None, shape: torch.Size, declared: str | None) -> str:
    """The name of the format in which a file holds a matrix.

    Raises ValueError naming tensors and both values: shapes, dtypes, a scale that is missing or scales nothing.
    """
    if weight.dtype in PLAIN:
        _expect(weight, tuple(shape))
        if scale is not None:
            raise ValueError(f"{scale.name} scales nothing: {weight.name} is {weight.dtype}")
        return "float32" if declared == "float32" else "bfloat16"
    if weight.dtype not in ("F8_E4M3", "I8", "U8"):
        raise ValueError(f"{weight.name} is {weight.dtype}, not a dtype of weights")
    if scale is None:
        names = " nor ".join(scale_names(weight.name))
        raise ValueError(
            f"{weight.name} is {weight.dtype} and its scale is missing: neither {names} is there"
        )
    if weight.dtype != "F8_E4M3":
        kind = "mxfp4"
    else:
        kind = "fp8_float32" if scale.dtype == "F32" else "fp8_ue8m0"
    if kind != "fp8_float32" and scale.dtype not in ("F8_E8M0", "U8"):
        raise ValueError(
            f"{scale.name} is {scale.dtype}, expected F8_E8M0 for {weight.dtype} codes"
        )
    if len(shape) != 2:
        raise ValueError(f"{weight.name} is {weight.dtype}, expected plain values {tuple(shape)}")
    (n, k), layout = shape, LAYOUTS[kind]
    _expect(weight, (n, k // layout.codes_per_byte))
    _expect(scale, tuple(layout.scale_shape(n, k)))
    return kind


def _expect(stored: Stored, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise ValueError(f"{stored.name} is {stored.dtype} {stored.shape}, expected {shape}")


def to_packed(name: str, weight: Tensor, scale: Tensor) -> Packed:
    """A file's own codes and scales, as formats pack them. Raises ValueError naming a scale that is no number."""
    if scale.dtype == torch.float32:
        bad = ~scale.isfinite()
    else:
        scale = scale.view(torch.uint8)
        bad = scale == E8M0_NAN
    if bad.any():
        block = tuple(bad.nonzero()[0].tolist())
        raise ValueError(f"{name}: the scale of block {block} is {scale[block].item()}, no number")
    return {"codes": weight.view(torch.uint8), "scales": scale}


def pending(
    name: str, format: Format, shape: torch.Size, packed: Callable[[], Packed]
) -> Iterator[Pending]:
    """The tensors that a file holds for a matrix, under official names; `packed()` is asked as each is written."""
    if format.name in PLAIN_FORMATS:
        yield Pending(name, PLAIN_FORMATS[format.name], shape, lambda: packed()["values"])
        return
    assert format.name in LAYOUTS, f"{name}: no file layout for {format.name}"
    layout, (n, k) = LAYOUTS[format.name], shape
    codes = torch.Size((n, k // layout.codes_per_byte))
    yield Pending(name, layout.codes, codes, lambda: packed()["codes"].view(layout.codes))
    scales = layout.scale_shape(n, k)
    name = scale_names(name)[0]
    yield Pending(name, layout.scales, scales, lambda: packed()["scales"].view(layout.scales))
