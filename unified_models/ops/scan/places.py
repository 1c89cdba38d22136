"""Where one layer's scan reads and keeps, for the kernels."""

from dataclasses import dataclass

from torch import Tensor

from unified_models.ops.pages import Pages, Sequences


@dataclass(frozen=True)
class Places:
    """pages: of the rows of the open chunks, x, time steps and b, which share a table; then of states, whose row c is
    the state after chunk c, in float32 and as rows of tokens see it. shape: H, P, N; groups: of b and c; chunk: Q."""

    pages: tuple[Pages, ...]
    shape: tuple[int, int, int]
    groups: int
    chunk: int

    @property
    def x(self) -> Pages:
        return self.pages[0]

    @property
    def dt(self) -> Pages:
        return self.pages[1]

    @property
    def b(self) -> Pages:
        return self.pages[2]

    @property
    def states(self) -> Pages:
        return self.pages[3]

    @property
    def seen(self) -> Pages:
        return self.pages[4]


@dataclass(frozen=True)
class Inputs:
    """What the forward read of flat rows [R, ...], x and b in any dtype with values of c's. Row p of sequence s is row
    base_S[s] + p. seen: r(S) [., H * P * N] in c's dtype, the state after chunk c of sequence s in row table_SK[s, c].
    """

    x_RHP: Tensor
    dt_RH: Tensor
    b_RGN: Tensor
    c_TGN: Tensor
    a_H: Tensor
    skip_H: Tensor
    seen_FX: Tensor
    table_SK: Tensor
    base_S: Tensor
    who: Sequences
    chunk: int


@dataclass(frozen=True)
class Launch:
    """Sizes of the backward's programs. columns: of a state's gradient that is carried back by itself; rows, readers:
    places of a chunk whose gradients `_rows_back` and `_readers_back` make by themselves; warps, stages of loops: of
    `_pass_back`, then theirs."""

    columns: int = 64
    rows: int = 32
    readers: int = 64
    warps: tuple[int, int, int] = (4, 8, 8)
    stages: tuple[int, int, int] = (2, 2, 2)


BFLOAT16 = Launch()
FLOAT32 = Launch(columns=32, rows=16, readers=16, stages=(1, 1, 1))
"""Operands of products take twice the memory, and no tensor cores."""
