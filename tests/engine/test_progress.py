"""A bar while the engine works, and its end after a failure."""

from typing import Any

import pytest

from unified_models import progress
from unified_models.engine import Sampling


def test_generate_counts_what_is_done(trial: Any, monkeypatch: Any) -> None:
    seen = []
    monkeypatch.setattr(progress.Bar, "show", lambda self, done: seen.append((done(), self.total)))
    trial.engine().generate(trial.prompts(10, 20), Sampling(max_tokens=5))
    assert seen[0] == (0, 40) and len(seen) == 5
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_no_bar_away_from_a_terminal(trial: Any, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    trial.engine().generate(trial.prompts(10), Sampling(max_tokens=5))
    assert capfd.readouterr() == ("", "")


def test_the_bar_ends_with_a_failure(trial: Any, monkeypatch: Any) -> None:
    bars, bar = [], progress.Bar
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(progress, "Bar", lambda *a, **k: bars.append(bar(*a, **k)) or bars[-1])
    monkeypatch.setattr(trial.model, "forward", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trial.engine().generate([[1]])
    assert len(bars) == 1 and bars[0].shown.finished is False
    assert bars[0].shown.live.is_started is False
