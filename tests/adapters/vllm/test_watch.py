"""NaNs among logits are named, on a GPU without waiting for it. No vLLM is needed."""

from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models.adapters.vllm.watch import Watch, judge

NAN, INF = float("nan"), float("inf")


class OnDevice(Tensor):
    """Says that it lies on a GPU."""

    is_cuda = True


class Event:
    """Known when it is told so."""

    made: list["Event"] = []  # noqa: RUF012
    known = False

    def __init__(self) -> None:
        self.made.append(self)

    def record(self) -> None:
        """Nothing runs."""

    def query(self) -> bool:
        return self.known


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[Event]:
    monkeypatch.setattr(Event, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Event.made


@pytest.mark.parametrize("vocab", [1, 7, 8, 33, 512, 4097])
def test_look_finds_a_nan_wherever_it_is(vocab: int) -> None:
    """Also of either sign, and beside infinities; the first row is named."""
    found = 0
    for place in {0, vocab // 2, vocab - 1}:
        for nan in (NAN, -NAN):
            for fill in (0.0, INF, -INF):
                logits = torch.randn(5, vocab)
                logits[3] = fill
                logits[3, place] = logits[4, place] = nan
                assert logits.isnan().any(-1).tolist() == [False] * 3 + [True] * 2
                with pytest.raises(FloatingPointError, match="logits of row 3 are NaN; after wei"):
                    Watch().look(logits)
                found += 1
    assert found >= 6


def test_look_takes_what_is_no_nan() -> None:
    logits = torch.randn(5, 33)
    logits[1], logits[2], logits[3, 0], logits[4, 1] = INF, -INF, INF, -INF
    Watch().look(logits)
    Watch().look(logits[:0])


def test_look_on_a_device_tells_in_a_later_call(events: list[Event]) -> None:
    """As soon as the result is there, in order; nobody waits, and nothing is forgotten."""
    good, bad = torch.randn(2, 3, 9).unbind()
    bad[2, 4] = NAN
    watch = Watch()
    watch.look(bad.as_subclass(OnDevice))
    watch.look(good.as_subclass(OnDevice))
    events[1].known = True
    watch.look(good.as_subclass(OnDevice))
    assert len(watch.waiting) == 3, "the first is not known yet"
    events[0].known = True
    with pytest.raises(FloatingPointError, match="logits of row 2"):
        watch.look(good.as_subclass(OnDevice))
    for event in events:
        event.known = True
    watch.look(good.as_subclass(OnDevice))
    assert len(events) == 5 and len(watch.waiting) == 1


def test_look_records_nothing_in_a_graph(
    events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    watch = Watch()
    watch.look(torch.full((1, 2), NAN).as_subclass(OnDevice))
    assert not events and not watch.waiting


def test_look_reads_the_logits_once(events: list[Event]) -> None:
    """One operator over [rows, vocabulary], which at 256 rows are more bytes than a layer's weights."""
    seen: list[tuple[Any, ...]] = []

    class Counting(OnDevice):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = getattr(func, "__name__", "")
            if not name.startswith("__") and any(
                isinstance(a, Tensor) and a.shape == (3, 9) for a in args
            ):
                seen.append((name,))
            return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]

    Watch().look(torch.randn(3, 9).as_subclass(Counting))
    assert seen == [("amax",)]


def test_judge_names_the_first_row() -> None:
    judge(torch.tensor([1.0, INF]))
    with pytest.raises(FloatingPointError, match="row 1 "):
        judge(torch.tensor([1.0, NAN, NAN]))
