"""Products on a GPU: on tensor cores where bfloat16 holds both operands' values exactly, in float32 elsewhere.

Which it is follows from the weight's format and shape, the dtypes of x and of the result, and what is installed, never
from how many rows there are.
"""

import functools
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.formats import Format
from unified_models.formats.activations import GROUP
from unified_models.formats.fp4 import NVFP4
from unified_models.formats.weights import BlockFP8, TensorFP8
from unified_models.ops.products import bmm
from unified_models.weight import Reading

LARGE = 1 << 20
"""Elements of a matrix. Compiling a kernel of DeepGEMM takes seconds, which a small product never gives back."""


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


def byte_codes(reading: Reading, stack: int, N: int) -> Tensor:
    """e4m3 codes of a block-FP8 weight, [stack, N, B * 128], zero-filled; a copy only where a block is not whole."""
    codes, missing = reading.packed["codes"].view(stack, N, -1), -reading.shape[-1] % GROUP
    if missing:
        codes = F.pad(codes, (0, missing))
    return codes.view(torch.float8_e4m3fn)


def block_codes(reading: Reading, fmt: BlockFP8, stack: int, N: int) -> tuple[Tensor, Tensor]:
    """`byte_codes`, and the scales of each row's blocks, float32 [stack, N, B]."""
    scales = fmt.scale_values(reading.packed).repeat_interleave(fmt.block, -2)
    scales = scales[..., : reading.shape[-2], :].reshape(stack, N, -1)
    return byte_codes(reading, stack, N), scales.contiguous()


def product(x_TK: Tensor, w_NK: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x @ w.T, [T, N]: float32 sums, rounded once to `dtype`."""
    if x_TK.dtype != torch.bfloat16 or w_NK.dtype == torch.float32:
        return float_product(x_TK, w_NK, dtype)
    from unified_models.ops.linear import narrow_triton

    if w_NK.dtype == torch.bfloat16 and large(w_NK) and deep_gemm_release() is not None:
        return deep_product(narrow_triton.lanes(x_TK), w_NK, dtype)
    return narrow_triton.product(x_TK, w_NK, dtype)


def float_product(x_TK: Tensor, w_NK: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """x @ w.T in float32, [T, N], rounded once to `dtype`: by parts of K where that is long, else whole. K decides."""
    from unified_models.ops.linear import split_triton

    if w_NK.shape[1] >= split_triton.LONG:
        out: Tensor = split_triton.product(x_TK, w_NK, dtype)
        return out
    return bmm(x_TK.float()[None], w_NK.float().t()[None])[0].to(dtype)


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


def takes_bytes(reading: Reading, dtype: torch.dtype) -> bool:
    """Whether DeepGEMM multiplies with this weight's bytes: see `whole_blocks`; for a result in bfloat16, which is all
    that its kernel writes."""
    if dtype != torch.bfloat16 or not whole_blocks(
        reading.format, reading.shape, reading.weight.groups
    ):
        return False
    return reading.packed["codes"].is_cuda and deep_gemm_release() is not None


def whole_blocks(fmt: Format, shape: torch.Size, groups: int) -> bool:
    """Whether a weight is a large matrix, or groups of them, of whole 128x128 blocks of FP8.

    An expert's never: `grouped_linear` has kernels of its own.
    """
    if not isinstance(fmt, BlockFP8) or len(shape) != 2:
        return False
    N, K = shape[0] // groups, shape[1]
    return N * K >= LARGE and N % fmt.block == 0 and K % fmt.block == 0


def block_bytes(reading: Reading, fmt: BlockFP8, stack: int, N: int) -> tuple[Tensor, Tensor]:
    """What DeepGEMM reads of a weight that it takes, and `grouped_linear` of any: `byte_codes`, and the float32 scales
    of blocks, [stack, N/128, B], N rounded up in each matrix of experts."""
    from unified_models.ops.linear import narrow_triton

    codes = narrow_triton.lanes(byte_codes(reading, stack, N).flatten(0, 1))
    scales = fmt.scale_values(reading.packed).contiguous()
    return codes.view(stack, N, -1), scales.view(stack, -(-N // fmt.block), scales.shape[-1])


def deep_scaled_product(x: Tensor, xs: Tensor, w_GNK: Tensor, ws_GCB: Tensor) -> Tensor:
    """x @ w.T by DeepGEMM on FP8 tensor cores, bfloat16: [T, N] of x [T, K] and one matrix, [T, G, N] of x [T, G, K] in
    one launch.

    Each 128-block's sum, times `xs * ws` (that product first), is added from the first block to the last in float32.
    x: e4m3 codes; xs: their scales [T, ..., K/128] with the tokens beside each other in memory
    (`quantize_rows(tokens_last=True)`); w, ws: see `block_bytes`.
    """
    out = torch.empty(*x.shape[:-1], w_GNK.shape[1], dtype=torch.bfloat16, device=x.device)
    if len(x):
        deep_gemm = import_module("deep_gemm")
        if x.dim() == 2:
            deep_gemm.fp8_gemm_nt((x, xs), (w_GNK[0], ws_GCB[0]), out)
        else:
            deep_gemm.fp8_einsum("bhr,hdr->bhd", (x, xs), (w_GNK, ws_GCB), out)
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
