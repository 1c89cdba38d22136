"""Pages as a list of rows for each token: what latent attention over pages means, on any device, and where its gradient
comes from."""

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.formats.records import LatentFP8
from unified_models.ops.blocks import whole
from unified_models.ops.pages import FLAT, Pages, Sequences


def pool_lists(count_T: Tensor | None, picks_TK: Tensor | None, most_entries: int) -> Tensor:
    """int64 [T, N]: the picks in their order, or all visible entries in ascending order; -1 where there is none."""
    if picks_TK is not None:
        return F.pad(picks_TK.long(), (0, whole(picks_TK.shape[1]) - picks_TK.shape[1]), value=-1)
    assert count_T is not None
    places = torch.arange(whole(most_entries), device=count_T.device)
    return places.masked_fill(places >= count_T.long()[:, None], -1)


def rows(
    pages: Pages, who: Sequences, lists_TN: Tensor, width: int, record: LatentFP8 | None
) -> tuple[Tensor, Tensor]:
    """Rows [R, width] and which of them each token reads, -1 for none: of flat plain pages a view, through which
    gradients pass; of others a copy, of what is read alone."""
    there_TN, sequence_T1 = lists_TN >= 0, who.sequence_T.long()[:, None]
    if pages.per_page == FLAT and record is None:
        index_TN = pages.table_SK[:, 0].long()[sequence_T1] + lists_TN
        rows_RD = pages.values.flatten(1)[:, pages.start : pages.start + width]
        return rows_RD, index_TN.masked_fill(~there_TN, -1)
    n_R, sequence_R = lists_TN[there_TN], sequence_T1.expand_as(lists_TN)[there_TN]
    page_R = pages.table_SK[sequence_R, n_R // pages.per_page].long()
    at_R = pages.start + page_R * pages.page + n_R % pages.per_page % pages.ring * pages.row
    values = pages.values
    size = values.untyped_storage().nbytes() // values.element_size() - values.storage_offset()
    line = values.as_strided((size,), (1,), values.storage_offset())
    channels = torch.arange(width if record is None else record.size(width), device=at_R.device)
    rows_RD = line[at_R[:, None] + channels]
    index_TN = torch.full_like(lists_TN, -1)
    index_TN[there_TN] = torch.arange(len(n_R), device=at_R.device)
    return rows_RD if record is None else record.decode(rows_RD, width), index_TN
