"""What kernels are told about a step: whose tokens they are, and where the rows of each sequence lie."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

FLAT = 1 << 30
"""Rows of a page that never ends: those of a pack, one sequence behind the other."""


@dataclass(frozen=True)
class Sequences:
    """The tokens of a step and their sequences, int32 on the device. Tokens and sequences of padding are behind the
    others: such a token has sequence -1, such a sequence has no tokens.

    sequence_T; position_T: of a token in its sequence; starts_S1 [S + 1]: the first token of each sequence; past_S:
    tokens before this step; total_S: after it.
    """

    sequence_T: Tensor
    position_T: Tensor
    starts_S1: Tensor
    past_S: Tensor
    total_S: Tensor


@dataclass(frozen=True)
class Pages:
    """Rows of sequences: row p of sequence s begins at element
    start + table_SK[s, p // per_page] * page + (p % per_page) % ring * row of `values`, taken as one line.

    table_SK: int32, stale where a sequence has no row; its rows may be further apart than they are long. start, page,
    row: in elements of values' dtype. ring: a page keeps so many rows, its last ones.
    """

    values: Tensor
    table_SK: Tensor
    per_page: int
    page: int
    row: int
    start: int = 0
    ring: int = FLAT

    @property
    def lane(self) -> int:
        """Elements that every row begins at a multiple of: those of 16 bytes, which a thread loads at once, or 1."""
        most = 16 // self.values.element_size()
        places = (self.page, self.row, self.start)
        whole = all(place % most == 0 for place in places) and self.values.data_ptr() % 16 == 0
        return most if whole else 1

    @property
    def places(self) -> tuple[int, int, int]:
        """page, row and start in lanes, as kernels take them: what is times a lane may be loaded whole."""
        lane = self.lane
        return self.page // lane, self.row // lane, self.start // lane

    @classmethod
    def flat(cls, rows_RD: Tensor, base_S: Tensor, start: int = 0) -> "Pages":
        """Row p of sequence s is rows_RD[base_S[s] + p]; start: of what is read within a row. Rows may be further apart
        than they are long."""
        if not rows_RD[:1].is_contiguous():
            rows_RD = rows_RD.contiguous()
        row = rows_RD.stride(0)
        return cls(rows_RD, base_S.int()[:, None].contiguous(), FLAT, row, row, start)


def row_lanes(rows: Tensor) -> tuple[int, int]:
    """How far rows lie apart, in lanes, and the elements of a lane (`Pages.lane`)."""
    most = 16 // rows.element_size()
    lane = most if rows.stride(0) % most == 0 and rows.data_ptr() % 16 == 0 else 1
    return rows.stride(0) // lane, lane


def write(who: Sequences, pages: Sequence[Pages], rows: Sequence[Tensor]) -> None:
    """Keep a row of each of `rows` [T, ...] for each token, in the pages of each, which share a table; in their dtype.

    Rows of padding are dropped, and so are those that a ring does not keep.
    """
    from unified_models.ops.pages_triton import write

    write(who, pages, rows)
