"""Products on a GPU: on tensor cores where bfloat16 holds both operands' values exactly, in float32 elsewhere.

Which it is follows from the weight's format and the dtype of x, never from how many rows there are.
"""

import functools
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.formats.activations import GROUP
from unified_models.formats.fp4 import NVFP4
from unified_models.formats.weights import BlockFP8, TensorFP8
from unified_models.ops.products import bmm
from unified_models.weight import Reading

LARGE = 1 << 20
"""Elements of a weight. Compiling a kernel of DeepGEMM takes seconds, which a small product never gives back."""


def values(reading: Reading) -> Tensor:
    """What a weight without block scales multiplies, in the shape of the weight: float32 of a float32 weight, else
    e4m3 or bfloat16 that lose nothing. Packed bytes themselves where they are that already."""
    fmt, packed = reading.format, reading.packed
    if fmt.name == "float32":
        return reading.dequantized()
    if isinstance(fmt, TensorFP8):
        return packed["codes"].view(torch.float8_e4m3fn)
    if isinstance(fmt, NVFP4):
        return fmt.scaled_codes(packed).bfloat16()  # six significant bits
    if fmt.name == "bfloat16":
        return packed["values"]
    return reading.dequantized().bfloat16()  # MXFP4: two significant bits


def block_codes(reading: Reading, fmt: BlockFP8, stack: int, N: int) -> tuple[Tensor, Tensor]:
    """e4m3 codes [stack, N, B * 128], zero-filled, and the scales of each row's blocks, float32 [stack, N, B]."""
    codes, missing = reading.packed["codes"].view(stack, N, -1), -reading.shape[-1] % GROUP
    if missing:
        codes = F.pad(codes, (0, missing))
    scales = fmt.scale_values(reading.packed).repeat_interleave(fmt.block, -2)
    scales = scales[..., : reading.shape[-2], :].reshape(stack, N, -1)
    return codes.view(torch.float8_e4m3fn), scales.contiguous()


def product(x_TK: Tensor, w_NK: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x @ w.T, [T, N]: float32 sums, rounded once to `dtype`."""
    if x_TK.dtype != torch.bfloat16 or w_NK.dtype == torch.float32:
        return bmm(x_TK.float()[None], w_NK.float().t()[None])[0].to(dtype)
    from unified_models.ops.linear import narrow_triton

    if w_NK.dtype == torch.bfloat16 and large(w_NK) and deep_gemm_release() is not None:
        return deep_product(narrow_triton.lanes(x_TK), w_NK, dtype)
    return narrow_triton.product(x_TK, w_NK, dtype)


def large(w_NK: Tensor) -> bool:
    """Whether DeepGEMM multiplies with this weight, where it is installed: its shape decides, not that of x."""
    N, K = w_NK.shape
    return N * K >= LARGE and N % 64 == 0 and K % 64 == 0


@functools.lru_cache(maxsize=1)
def deep_gemm_release() -> str | None:
    """The release of DeepGEMM that multiplies; None: it is not installed, or this is no Hopper GPU."""
    if find_spec("deep_gemm") is None or torch.cuda.get_device_capability() != (9, 0):
        return None
    return str(import_module("deep_gemm").__version__)


def deep_product(x_TK: Tensor, w_NK: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x @ w.T by DeepGEMM, [T, N]: the bits of `narrow_triton.product`, at any number of rows. It writes float32 and
    bfloat16."""
    if dtype not in (torch.float32, torch.bfloat16):
        return deep_product(x_TK, w_NK).to(dtype)
    out = torch.empty(len(x_TK), len(w_NK), dtype=dtype, device=x_TK.device)
    if len(x_TK):
        import_module("deep_gemm").bf16_gemm_nt(x_TK, w_NK, out)
    return out


def scaled_product(
    x_TK: Tensor,
    xs_TB: Tensor,
    w_NK: Tensor,
    ws_NB: Tensor,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Codes times codes of each 128-block, scaled, added in block order; [T, N], rounded once to `dtype`."""
    from unified_models.ops.linear import narrow_triton

    return narrow_triton.scaled_product(x_TK, xs_TB, w_NK, ws_NB, dtype)
