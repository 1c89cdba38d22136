"""Bad input is refused with the argument and both values, before anything changes; nothing keeps memory after a
failure."""

import math
from typing import Any

import pytest
import torch

from unified_models.context.slots import Slot
from unified_models.engine import Sampling


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("top_p", 0.9),
        ("top_k", 20),
        ("min_p", 0.1),
        ("repetition_penalty", 1.1),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", {3: 1.0}),
    ],
)
def test_a02_another_distribution_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{field} = .* is refused"):
        Sampling(**{field: value})


def test_a02_neutral_values_pass() -> None:
    Sampling(top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=1.0, logit_bias={})
    Sampling(top_k=0, presence_penalty=0.0, frequency_penalty=0)


@pytest.mark.parametrize("temperature", [-1.0, math.nan, math.inf, 1e-45, "hot", None])
def test_temperatures(trial: Any, temperature: float) -> None:
    with pytest.raises(ValueError, match="temperature must be"):
        Sampling(temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be"):
        trial.engine().score([[1, 2]], temperature=temperature)


def test_scoring_needs_a_temperature(trial: Any) -> None:
    with pytest.raises(ValueError, match="temperature must be"):
        trial.engine().score([[1, 2]], temperature=0.0)


@pytest.mark.parametrize(
    "bad",
    [
        {"max_tokens": 0},
        {"max_tokens": 1.5},
        {"max_tokens": True},
        {"seed": None},
        {"stop_ids": ("a",)},
    ],
)
def test_samplings(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        Sampling(**bad)


PROMPTS = {
    "empty": ([], "prompt 1 is empty"),
    "text": ("abc", "prompt 1 must be a list of ints, got str"),
    "tensor": (torch.tensor([1, 2]), "prompt 1 must be a list of ints, got Tensor"),
    "floats": ([1, 2.0], "prompt 1, position 1: 2.0 is no int"),
    "bools": ([1, True], "prompt 1, position 1: True is no int"),
    "nothing": ([1, None], "prompt 1, position 1: None is no int"),
    "negative": ([1, 2, -1], r"prompt 1, position 2: token -1 is not in \[0, 64\)"),
    "too large": ([64], r"prompt 1, position 0: token 64 is not in \[0, 64\)"),
    "long": (
        [1] * 121,
        r"prompt 1 of 121 tokens \+ max_tokens 8 = 129 does not fit cache_tokens 128",
    ),
}


@pytest.mark.parametrize(("prompt", "message"), PROMPTS.values(), ids=PROMPTS)
def test_prompts(trial: Any, prompt: Any, message: str) -> None:
    engine = trial.engine(cache_tokens=128)
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2], prompt], Sampling(max_tokens=8))
    assert engine.step() is False and engine.stats.steps == 0


def test_b14_what_does_not_fit(trial: Any) -> None:
    engine = trial.engine(cache_tokens=8192)
    with pytest.raises(
        ValueError, match=r"4090 tokens \+ max_tokens 8 = 4098 .* max_position_embeddings 4096"
    ):
        engine.submit([1] * 4090, Sampling(max_tokens=8))
    with pytest.raises(
        ValueError, match="sequence 0 of 4097 tokens does not fit max_position_embeddings 4096"
    ):
        engine.score([[1] * 4097])
    with pytest.raises(ValueError, match="a sequence of 1 tokens has no token to score"):
        engine.submit_score([1])


def test_as_many_samplings_as_prompts(trial: Any) -> None:
    with pytest.raises(ValueError, match="1 samplings for 2 prompts"):
        trial.engine().generate([[1], [2]], [Sampling()])


def test_stop_ids_are_tokens(trial: Any) -> None:
    with pytest.raises(ValueError, match="stop_ids, position 1: token 64"):
        trial.engine().generate([[1]], Sampling(stop_ids=(1, 64)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cache_tokens": 0}, "cache_tokens must be an int of at least 1, got 0"),
        ({"step_tokens": -1}, "step_tokens must be an int of at least 1, got -1"),
        ({"max_sequences": 1.5}, "max_sequences must be an int of at least 1, got 1.5"),
        ({"page_tokens": True}, "page_tokens must be an int of at least 1, got True"),
        ({"prefix_cache": None}, "prefix_cache must be True or False, got None"),
        ({"page_tokens": 6}, "page_tokens 6 and the slot's stride 4 must be multiples"),
    ],
)
def test_engine_options(trial: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trial.engine(**options)


def test_b10_a_slot_that_is_not_stored_is_refused_at_start(trial: Any) -> None:
    class Other(Slot):
        """A kind that nobody stores."""

    trial.model.layers[0].slot = Other()
    with pytest.raises(ValueError, match=r"layers.0.slot: .* Rows, Entries and States, not Other"):
        trial.engine()


def empty_handed(engine: Any) -> bool:
    """No request has a page."""
    return engine._memory.used_pages == 0 and not any(
        any(table.pool.users) for table in engine._memory.tables.values()
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_failure_releases_the_memory_of_its_requests(
    trial: Any, monkeypatch: Any, error: Any
) -> None:
    engine = trial.engine(step_tokens=16)
    forward, calls = trial.model.forward, []

    def failing(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 7:
            raise error
        return forward(*args)

    monkeypatch.setattr(trial.model, "forward", failing)
    other = engine.submit([1, 2, 3], Sampling(max_tokens=30))
    with pytest.raises(error):
        engine.generate(trial.prompts(30, 40, 50), Sampling(max_tokens=30))
    engine.run([other])
    assert trial.check([[1, 2, 3]], [other.output()]) == 30
    assert empty_handed(engine) and engine.step() is False
    prompts = trial.prompts(30, 40)
    assert trial.check(prompts, engine.generate(prompts, Sampling(max_tokens=5))) == 10


def test_c01_nan_is_reported_and_nothing_is_sampled(trial: Any, monkeypatch: Any) -> None:
    engine = trial.engine()
    logits = trial.model.logits
    monkeypatch.setattr(trial.model, "logits", lambda *args: logits(*args) * math.nan)
    with pytest.raises(FloatingPointError, match=r"request 0: the logprob after token 4 .* is NaN"):
        engine.generate(trial.prompts(5), Sampling(max_tokens=3))
    assert empty_handed(engine) and engine.stats.tokens_sampled == 0


def test_abort(trial: Any) -> None:
    engine = trial.engine(max_sequences=2, step_tokens=8)
    requests = [engine.submit(prompt, Sampling(max_tokens=20)) for prompt in trial.prompts(9, 9, 9)]
    for _ in range(6):
        engine.step()
    assert [request.state for request in requests] == ["running", "running", "waiting"]
    engine.abort(requests[0])
    engine.abort(requests[2])
    engine.run()
    engine.abort(requests[1])
    assert [request.state for request in requests] == ["aborted", "finished", "aborted"]
    assert [request.output().reason for request in requests] == ["aborted", "length", "aborted"]
    assert trial.check(trial.prompts(9, 9, 9)[1:2], [requests[1].output()]) == 20
    assert empty_handed(engine)
