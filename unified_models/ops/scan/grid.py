"""Which rows make up each chunk and tile of a scan step, on each sequence's own absolute grid."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

TILE = 16


@dataclass(frozen=True)
class Grid:
    """The chunks of a step that have new tokens, sequence by sequence in ascending order, and their tiles of 16 places.

    rows_UQ: the row of x, dt and b at each place of chunk u, -1 where there is no token (yet); Q is the chunk's length
    rounded up to whole tiles. sequence_U: whose chunk it is. number_U: 0 for the first of its sequence in this step,
    1 for the next, ... full_U: whether its last place has a token. chunk_V, tile_V: the chunk of each tile with new
    tokens, and the tile's place in it. tokens_VL: the step's token at each place of tile v, -1 where there is none;
    read place by place they are all tokens of the step in their order.
    """

    rows_UQ: Tensor
    sequence_U: Tensor
    number_U: Tensor
    full_U: Tensor
    chunk_V: Tensor
    tile_V: Tensor
    tokens_VL: Tensor

    @cached_property
    def depth(self) -> int:
        """The most chunks that one sequence has in this step."""
        return int(self.number_U.max()) + 1 if len(self.number_U) else 0
