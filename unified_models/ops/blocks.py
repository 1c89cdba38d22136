"""Lists of rows in blocks of 64: what attention and selection gather, and the grid that their sums run on."""

from torch import Tensor
from torch.nn import functional as F

BLOCK = 64
LANES = 16


def whole(n: int) -> int:
    """n rounded up to whole blocks."""
    return -(-n // BLOCK) * BLOCK


def blocks(index_TN: Tensor) -> list[slice]:
    """The places of each block of a list, in order."""
    return [slice(b, b + BLOCK) for b in range(0, index_TN.shape[1], BLOCK)]


def filled(x: Tensor) -> Tensor:
    """float32, contiguous on 64 bytes, the last dimension zero-filled to a multiple of 16: a product of narrower or
    unaligned matrices has other bits at another place in the batch."""
    x = x.float().contiguous()
    if x.shape[-1] % LANES:
        return F.pad(x, (0, -x.shape[-1] % LANES))
    return x.clone() if x.data_ptr() % 64 else x


def ending_in_zero(rows_RD: Tensor) -> Tensor:
    """The rows, filled, and one row of zeros after them: what index -1 reads, whatever the memory holds."""
    return F.pad(rows_RD.float(), (0, -rows_RD.shape[-1] % LANES, 0, 1))
