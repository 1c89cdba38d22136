"""Which rows each token reads, on the sequence's own absolute grid; -1 where there is none."""

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.context.interface import Pool
from unified_models.context.slots import Entries, Rows, State
from unified_models.context.step import Step, owners
from unified_models.ops.blocks import whole, window
from unified_models.ops.scan.grid import TILE, Grid


def window_lists(step: Step, slot: Rows, base_S: Tensor) -> Tensor:
    """[T, N]: the last `slot.keep` tokens of each token, itself included, in absolute blocks of 64 positions."""
    seen_TN = window(step.positions_T, slot.keep, step.most)
    return torch.where(seen_TN < 0, -1, base_S[step.sequence_T, None] + seen_TN)


def pool_lists(step: Step, pool: Pool, picks_TK: Tensor | None) -> Tensor:
    """[T, N]: the picks in their order, or all visible entries in ascending order; N a multiple of 64.

    A pick that its token cannot see yet is refused: an entry is visible once its window closed.
    """
    base_T1 = pool.readable.base_S[step.sequence_T, None]
    if picks_TK is None:
        places = torch.arange(whole(step.most // pool.slot.stride), device=step.device)
        return (base_T1 + places).masked_fill(places >= pool.count_T[:, None], -1)
    if bool((picks_TK >= pool.count_T[:, None]).any()):
        raise ValueError(f"{pool.slot.path}: a pick names an entry whose window has not closed")
    lists = torch.where(picks_TK < 0, -1, base_T1 + picks_TK)
    return F.pad(lists, (0, whole(lists.shape[1]) - lists.shape[1]), value=-1)


def numbers(first_S: Tensor, counts_S: Tensor) -> Tensor:
    """first[s], first[s] + 1, ..., counts[s] of them, sequence after sequence."""
    sequence_U = owners(counts_S)
    starts_S = counts_S.cumsum(0) - counts_S
    return torch.arange(len(sequence_U), device=counts_S.device) + (first_S - starts_S)[sequence_U]


def window_rows(slot: Entries, first_S: Tensor, counts_S: Tensor, base_S: Tensor) -> Tensor:
    """[U, span]: the open rows that each closing window reads, oldest first; -1 before the sequence's start.

    first_S, counts_S: as memory.closed gives them; base_S: of the open rows.
    """
    last_U = (numbers(first_S, counts_S) + 1) * slot.stride - 1
    seen_UP = last_U[:, None] + torch.arange(1 - slot.span, 1, device=base_S.device)
    return torch.where(seen_UP < 0, -1, base_S[owners(counts_S), None] + seen_UP)


def tap_rows(step: Step, slot: Rows, base_S: Tensor) -> Tensor:
    """[T, K]: the last `slot.keep` rows of each token, itself last; -1 before the sequence's start."""
    assert slot.keep is not None, f"{slot.path}: a convolution reads a bounded number of rows"
    seen_TK = step.positions_T[:, None] + torch.arange(1 - slot.keep, 1, device=step.device)
    return torch.where(seen_TK < 0, -1, base_S[step.sequence_T, None] + seen_TK)


def scan_grid(step: Step, slot: State, base_S: Tensor) -> Grid:
    """The chunks and tiles with tokens of this step. base_S: of the open rows."""
    Q = slot.chunk
    first_S = step.past_S // Q
    counts_S = torch.where(step.lengths_S > 0, -(-step.total_S // Q) - first_S, 0)
    sequence_U = owners(counts_S)
    start_U = numbers(first_S, counts_S) * Q
    past_U, total_U = step.past_S[sequence_U], step.total_S[sequence_U]

    places = torch.arange(-(-Q // TILE) * TILE, device=step.device)
    there_UQ = (places < Q) & (start_U[:, None] + places < total_U[:, None])
    rows_UQ = torch.where(there_UQ, (base_S[sequence_U] + start_U)[:, None] + places, -1)

    first_U = (past_U - start_U).clamp_min(0) // TILE
    tiles_U = -(-(total_U - start_U).clamp_max(Q) // TILE) - first_U
    chunk_V, tile_V = owners(tiles_U), numbers(first_U, tiles_U)
    place_VL = tile_V[:, None] * TILE + places[:TILE]
    position_VL = start_U[chunk_V, None] + place_VL
    new_VL = (position_VL >= past_U[chunk_V, None]) & (position_VL < total_U[chunk_V, None])
    token_VL = position_VL + (step.starts_S[:-1] - step.past_S)[sequence_U[chunk_V], None]
    return Grid(
        rows_UQ=rows_UQ,
        sequence_U=sequence_U,
        number_U=start_U // Q - first_S[sequence_U],
        full_U=start_U + Q <= total_U,
        chunk_V=chunk_V,
        tile_V=tile_V,
        tokens_VL=torch.where(new_VL & (place_VL < Q), token_VL, -1),
    )
