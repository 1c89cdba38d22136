"""Where one layer's scan reads and keeps, for the kernels."""

from dataclasses import dataclass

from unified_models.ops.pages import Pages


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
