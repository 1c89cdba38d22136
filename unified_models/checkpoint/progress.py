"""A progress bar for the loads that are long enough to need one."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

PATIENCE = 2.0  # seconds without a bar


class Bar:
    """Counts bytes; appears on a terminal once the work has taken longer than `PATIENCE`."""

    def __init__(self, what: str, total: int, show: bool) -> None:
        self.what, self.total, self.done = what, total, 0
        self.wanted = show and sys.stderr.isatty()
        self.start = time.perf_counter()
        self.shown: Progress | None = None

    def advance(self, size: int) -> None:
        self.done += size
        if self.wanted and self.shown is None and time.perf_counter() - self.start > PATIENCE:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                DownloadColumn(),
                TimeRemainingColumn(),
            )
            self.shown = Progress(*columns, console=Console(stderr=True), transient=True)
            self.task = self.shown.add_task(self.what, total=self.total)
            self.shown.start()
        if self.shown is not None:
            self.shown.update(self.task, completed=self.done)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.shown is not None:
            self.shown.stop()
