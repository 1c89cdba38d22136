"""A progress bar for work that takes a while, on terminals only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 2.0  # seconds before a bar appears


class Bar:
    """Shows how much of `total` is done, from PATIENCE seconds on."""

    def __init__(self, what: str, total: int, console: Console | None = None) -> None:
        self.what, self.total = what, total
        self._console = console or Console(stderr=True)
        self._began = monotonic()
        self._progress: Progress | None = None

    def show(self, done: Callable[[], int]) -> None:
        if not self._console.is_terminal or monotonic() - self._began < PATIENCE:
            return
        if self._progress is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._progress.add_task(self.what, total=self.total)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done())

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


@contextmanager
def bar(what: str, total: int) -> Iterator[Bar]:
    """A bar that is closed at the end, come what may."""
    shown = Bar(what, total)
    try:
        yield shown
    finally:
        shown.close()
