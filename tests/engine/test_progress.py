"""A bar on a terminal when work takes long, and nothing anywhere else."""

import io
from typing import Any

from rich.console import Console

from unified_models.engine import Sampling, progress


def test_a_bar_appears_on_a_terminal_after_a_while(monkeypatch: Any) -> None:
    for terminal, patience, shown in ((True, 0.0, True), (True, 60.0, False), (False, 0.0, False)):
        monkeypatch.setattr(progress, "PATIENCE", patience)
        out = io.StringIO()
        bar = progress.Bar("generating", 10, Console(file=out, force_terminal=terminal))
        bar.show(lambda: 3)
        bar.close()
        assert ("generating" in out.getvalue() and "3/10" in out.getvalue()) is shown


def test_generate_counts_what_is_done(trial: Any, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(progress.Bar, "show", lambda self, done: seen.append((done(), self.total)))
    trial.engine().generate(trial.prompts(10, 20), Sampling(max_tokens=5))
    assert seen[0] == (0, 40) and len(seen) == 5
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_the_bar_is_closed_after_a_failure(trial: Any, monkeypatch: Any) -> None:
    closed = []
    monkeypatch.setattr(progress.Bar, "close", lambda self: closed.append(self.what))
    monkeypatch.setattr(trial.model, "forward", lambda *_: 1 / 0)
    try:
        trial.engine().generate([[1]])
    except ZeroDivisionError:
        closed.append("raised")
    assert closed == ["generating", "raised"]
