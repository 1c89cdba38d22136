"""Pages as lists of rows: what attention over pages means, on any device, and where its gradient comes from."""

import torch
from torch import Tensor

from unified_models.ops.blocks import window
from unified_models.ops.pages import FLAT, Pages, Sequences


def lists(who: Sequences, base_S: Tensor, keep: int | None, most: int) -> Tensor:
    """int64 [T, N]: the last `keep` rows of each token, itself included, in absolute blocks of 64 positions; row p of
    sequence s is base_S[s] + p. For tokens that have a sequence."""
    seen_TN = window(who.position_T, keep, most)
    return torch.where(seen_TN < 0, -1, base_S.long()[who.sequence_T.long(), None] + seen_TN)


def rows(
    pages: Pages, who: Sequences, keep: int | None, groups: int, width: int
) -> tuple[Tensor, Tensor]:
    """Rows [R, G, D] that this step's tokens see, and where row 0 of each sequence is, or would be, among them: of flat
    pages a view, through which gradients pass; of others a copy."""
    if pages.per_page != FLAT:
        return _paged_rows(pages, who, keep, groups, width)
    rows = pages.values.flatten(1)[:, pages.start : pages.start + groups * width]
    return rows.unflatten(1, (groups, width)), pages.table_SK[:, 0]


def _paged_rows(
    pages: Pages, who: Sequences, keep: int | None, groups: int, width: int
) -> tuple[Tensor, Tensor]:
    there_S = who.starts_S1[1:] > who.starts_S1[:-1]
    first_S = torch.zeros_like(who.past_S) if keep is None else (who.past_S - keep + 1).clamp_min(0)
    counts_S = torch.where(there_S, who.total_S - first_S, 0).long()
    base_S = counts_S.cumsum(0) - counts_S - first_S  # counts
    sequence_R = torch.arange(len(counts_S), device=counts_S.device).repeat_interleave(counts_S)
    p_R = torch.arange(len(sequence_R), device=counts_S.device) - base_S[sequence_R]
    page_R = pages.table_SK[sequence_R, p_R // pages.per_page].long()
    at_R = pages.start + page_R * pages.page + p_R % pages.per_page * pages.row
    values = pages.values
    size = values.untyped_storage().nbytes() // values.element_size() - values.storage_offset()
    line = values.as_strided((size,), (1,), values.storage_offset())
    channels = torch.arange(groups * width, device=at_R.device)
    return line[at_R[:, None] + channels].unflatten(1, (groups, width)), base_S


def dequantized(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """float32(code) * scale, rounded to dtype; uint8 holds e4m3 codes."""
    if codes.dtype == torch.uint8:
        codes = codes.view(torch.float8_e4m3fn)
    return (codes.float() * scale).to(dtype)
