"""Lists of rows in blocks of 64: what attention and selection gather, and the grid that their sums run on."""

import torch
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


def window(position_T: Tensor, keep: int | None, most: int) -> Tensor:
    """int64 [T, N]: the last `keep` positions up to each token's own, in absolute blocks of 64, -1 where there is none.
    keep None: all, of which no token has more than `most`.

    Place j stands for position 64 * floor(oldest / 64) + j, so a position's place within its block never depends on
    the step.
    """
    position_T1 = position_T.long()[:, None]
    if keep is None:
        oldest_T1, columns = torch.zeros_like(position_T1), whole(max(most, 1))
    else:
        oldest_T1, columns = (position_T1 - keep + 1).clamp_min(0), whole(keep - 1) + BLOCK
    seen_TN = oldest_T1 // BLOCK * BLOCK + torch.arange(columns, device=position_T.device)
    return seen_TN.masked_fill((seen_TN < oldest_T1) | (seen_TN > position_T1), -1)


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
