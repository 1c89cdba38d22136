"""What a mixer keeps between steps, declared as data. How it is stored is the memory's business."""

from torch import nn

from unified_models.formats import FLOAT32_RECORD, PlainRecord, Record, TailRecord


class Slot:
    """Something a module keeps for each sequence. Its identity is its module path, set by `slots`."""

    path: str = ""

    def layout(self) -> str:
        """All that decides what a kept row's bytes mean, in words."""
        raise AssertionError(f"{type(self).__name__} says no layout")

    def plain(self) -> None:
        """Keep everything in float32: no quantisation."""

    def check(self) -> None:
        """ValueError where the record cannot hold a row of this size."""


class Rows(Slot):
    """One row of `dim` values for each token, of which the last `keep` stay readable (None: all).

    `keep` counts the token itself: a window of 128 keeps 128.
    """

    def __init__(
        self, dim: int, *, keep: int | None = None, record: Record = FLOAT32_RECORD
    ) -> None:
        self.dim, self.keep, self.record = dim, keep, record

    def layout(self) -> str:
        return f"rows of {self.dim}, keep {self.keep}, {self.record.name}"

    def plain(self) -> None:
        self.record = FLOAT32_RECORD

    def check(self) -> None:
        self.record.size(self.dim)


class Entries(Slot):
    """One row of `dim` values for every `stride` tokens, and the float32 inputs of the windows still open.

    overlap: a window also reads the `stride` tokens before it. `open` holds, for each token, the compressor's input
    (its values, then its gates: 2 * channels), as far back as a window reaches.
    """

    def __init__(
        self, dim: int, *, stride: int, overlap: bool = False, record: Record = FLOAT32_RECORD
    ) -> None:
        self.dim, self.stride, self.overlap, self.record = dim, stride, overlap, record
        self.span = stride * (2 if overlap else 1)
        """tokens that one window reads"""
        self.channels = dim * (2 if overlap else 1)
        self.open = Rows(2 * self.channels, keep=self.span)

    def layout(self) -> str:
        overlap = ", overlapping" if self.overlap else ""
        return f"entries of {self.dim}, stride {self.stride}{overlap}, {self.record.name}"

    def plain(self) -> None:
        self.record = FLOAT32_RECORD

    def check(self) -> None:
        self.record.size(self.dim)


class State(Slot):
    """A scan's float32 state at the last multiple of `chunk` tokens, and the inputs of the tokens since.

    shape: (heads H, head_dim P, state_size N). groups: of b. `open` holds a row for each token: x (H * P values) and
    b (groups * N) in `record`, then the time steps (H) in float32.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        groups: int,
        chunk: int,
        record: PlainRecord = FLOAT32_RECORD,
    ) -> None:
        self.shape, self.groups, self.chunk = shape, groups, chunk
        H, P, N = shape
        self.parts = (H * P, groups * N, H)
        """channels of x, b and the time steps in an open row"""
        self.open = Rows(sum(self.parts), keep=chunk, record=self._open_record(record))

    def _open_record(self, record: PlainRecord) -> Record:
        wide = self.parts[-1]
        return record if record.dtype == FLOAT32_RECORD.dtype else TailRecord(record, wide)

    @property
    def size(self) -> int:
        """Values of the state."""
        H, P, N = self.shape
        return H * P * N

    def layout(self) -> str:
        return f"state {self.shape} float32, chunk {self.chunk}, open {self.open.layout()}"

    def plain(self) -> None:
        self.open.plain()


def slots(model: nn.Module) -> dict[str, Slot]:
    """Every slot of a model by its path, in module order; sets each slot's `path`."""
    found: dict[str, Slot] = {}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Slot):
                value.path = f"{name}.{attribute}" if name else attribute
                found[value.path] = value
    return found
