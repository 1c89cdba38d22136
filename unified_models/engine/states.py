"""The scan states of all running sequences: one a page of the group that also holds the open rows."""

import numpy as np
import torch
from torch import Tensor

from unified_models.context.slots import State
from unified_models.context.step import Step
from unified_models.engine.table import Numbers, PageTable, numbered

NOTHING = -1


class StateStore:
    """Page k of a sequence covers its tokens [k * chunk, (k + 1) * chunk): their open rows, and the float32 state after
    the last of them once it has come.

    A page says itself what it holds: `held_P2`, the position of its first row and how many rows it has. What is read
    is checked against it, so a page that was copied, freed or completed at another place is refused, not used.
    """

    def __init__(self, slot: State, table: PageTable, device: torch.device) -> None:
        assert table.page_tokens == slot.chunk, f"{slot.path}: a page is one chunk"
        self.slot, self.table = slot, table
        self.data_PX = torch.full((table.pool.num_pages, slot.size), torch.nan, device=device)
        self.held_P2 = np.full((table.pool.num_pages, 2), NOTHING, np.int64)

    @property
    def num_bytes(self) -> int:
        return self.data_PX.numel() * self.data_PX.element_size()

    def scrub(self, page: int) -> None:
        """Nothing of the page's content may be used again."""
        self.data_PX[page] = torch.nan
        self.held_P2[page] = NOTHING

    def read(self, step: Step, seats_S: Numbers) -> Tensor:
        """The state of each sequence at its last boundary before the step, [S, H, P, N]; zeros before the first.

        RuntimeError: a page does not hold what the sequence needs.
        """
        Q, past_S = self.slot.chunk, np.array(step.past, np.int64)
        chunk_S = past_S // Q
        open_S = np.nonzero(past_S % Q)[0]
        self._check(
            self._pages(seats_S[open_S], chunk_S[open_S]), chunk_S[open_S], past_S[open_S] % Q
        )
        old_S = np.nonzero(chunk_S)[0]
        pages = self._pages(seats_S[old_S], chunk_S[old_S] - 1)
        self._check(pages, chunk_S[old_S] - 1, np.full_like(pages, Q))
        out = self.data_PX.new_zeros(len(past_S), self.slot.size)
        device = self.data_PX.device
        kept = self.data_PX.index_select(0, torch.from_numpy(pages).to(device))
        out.index_copy_(0, torch.from_numpy(old_S).to(device), kept)
        states: Tensor = out.unflatten(1, self.slot.shape)
        return states

    def write(self, step: Step, seats_S: Numbers, new_UHPN: Tensor) -> None:
        """Keep the states of the chunks that this step fills, and say what its pages hold now."""
        Q, past_S = self.slot.chunk, np.array(step.past, np.int64)
        total_S = past_S + np.array(step.lengths, np.int64)
        seat_N, chunk_N, _ = numbered(seats_S, past_S // Q, total_S // Q)
        assert len(seat_N) == len(new_UHPN), f"{self.slot.path}: {len(new_UHPN)} states"
        pages = torch.from_numpy(self._pages(seat_N, chunk_N)).to(self.data_PX.device)
        self.data_PX.index_copy_(0, pages, new_UHPN.flatten(1))
        touched = np.where(total_S > past_S, -(-total_S // Q), past_S // Q)
        seat_N, chunk_N, _ = numbered(seats_S, past_S // Q, touched)
        total_N = total_S.repeat(touched - past_S // Q)
        page_N = self._pages(seat_N, chunk_N)
        self.held_P2[page_N, 0] = chunk_N * Q
        self.held_P2[page_N, 1] = np.minimum(total_N - chunk_N * Q, Q)

    def _pages(self, seat_N: Numbers, chunk_N: Numbers) -> Numbers:
        pages: Numbers = self.table.pages_SK[seat_N, chunk_N]
        return pages

    def _check(self, page_N: Numbers, chunk_N: Numbers, rows_N: Numbers) -> None:
        first_N = chunk_N * self.slot.chunk
        # A step that was interrupted may have left more rows than were settled; it runs again and writes them again.
        wrong = (self.held_P2[page_N, 0] != first_N) | (self.held_P2[page_N, 1] < rows_N)
        if wrong.any():
            i = int(np.nonzero(wrong)[0][0])
            first, rows = self.held_P2[page_N[i]].tolist()
            raise RuntimeError(
                f"{self.slot.path}: page {page_N[i]} holds {rows} rows from position {first}; "
                f"{rows_N[i]} from position {first_N[i]} are needed"
            )
