"""A progress bar for work that turns out long, on terminals only."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

PATIENCE = 2.0  # seconds before a bar appears


class Bar:
    """Shows how much of `total` is done, from PATIENCE seconds on."""

    def __init__(
        self, what: str, total: int, *, of_bytes: bool = False, wanted: bool = True
    ) -> None:
        self.what, self.total, self.done = what, total, 0
        self.wanted = wanted and sys.stderr.isatty()
        self.counter = DownloadColumn if of_bytes else MofNCompleteColumn
        self.began = monotonic()
        self.shown: Progress | None = None

    def advance(self, more: int) -> None:
        """So much more is done."""
        self.done += more
        self.show(lambda: self.done)

    def show(self, done: Callable[[], int]) -> None:
        """So much is done in all; asked for only when there is a bar to show it."""
        if not self.wanted or monotonic() - self.began < PATIENCE:
            return
        if self.shown is None:
            text, rest = TextColumn("{task.description}"), TimeRemainingColumn()
            columns = (text, BarColumn(), self.counter(), rest)
            self.shown = Progress(*columns, console=Console(stderr=True), transient=True)
            self.shown.add_task(self.what, total=self.total)
            self.shown.start()
        self.shown.update(self.shown.task_ids[0], completed=done())


@contextmanager
def bar(what: str, total: int, *, of_bytes: bool = False, wanted: bool = True) -> Iterator[Bar]:
    """A bar that is closed at the end, come what may."""
    made = Bar(what, total, of_bytes=of_bytes, wanted=wanted)
    try:
        yield made
    finally:
        if made.shown is not None:
            made.shown.stop()
