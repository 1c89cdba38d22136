"""The real thing, small: tokens sampled by DeepSeek-V4 carry the bits of a prefill and of the training forward.

Three layers: window only, windows of 4 with an indexer, windows of 128. Test names begin with the row of the field
cases that they answer.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import unified_models as um
from unified_models.engine import Output

LAYERS = {
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 1,
    "hc_mult": 2,
    "n_routed_experts": 4,
    "index_n_heads": 4,
}
LENGTHS = (1, 119, 40, 17)
SAMPLING = um.Sampling(max_tokens=18, temperature=0.8, seed=11)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> list[Path]:
    """Two checkpoints with the same configuration and other weights."""
    made = []
    for seed in (0, 1):
        folder = tmp_path_factory.mktemp("checkpoint") / str(seed)
        um.make_tiny("deepseek_v4", folder, seed=seed, **LAYERS)
        made.append(folder)
    return made


@pytest.fixture
def model(folders: list[Path]) -> Any:
    return um.load(folders[0])


@pytest.fixture
def other(folders: list[Path]) -> Any:
    return um.load(folders[1])


def prompts(*lengths: int) -> list[list[int]]:
    return [
        [(13 * p * p + 5 * p + 31 * i) % 512 for p in range(length)]
        for i, length in enumerate(lengths)
    ]


def trained(
    model: Any, given: list[list[int]], outs: list[Output], temperature: float
) -> list[Tensor]:
    """The training forward's logprobs of the sampled tokens."""
    sequences = [[*prompt, *out.ids] for prompt, out in zip(given, outs, strict=True)]
    with torch.no_grad():
        all_of_them = um.logprobs(model, sequences, temperature)
    return [lps[len(prompt) - 1 :] for prompt, lps in zip(given, all_of_them, strict=True)]


@pytest.fixture(scope="module")
def expected(folders: list[Path]) -> tuple[list[list[int]], list[Tensor]]:
    """What every schedule must give: ids, and logprobs by the training forward."""
    model = um.load(folders[0])
    outs = um.Engine(model).generate(prompts(*LENGTHS), SAMPLING)
    return [out.ids for out in outs], trained(model, prompts(*LENGTHS), outs, 0.8)


SCHEDULES: dict[str, dict[str, Any]] = {
    "one_step": {"step_tokens": 4096},
    "step7": {"step_tokens": 7, "max_sequences": 3},
    "step16_page4": {"step_tokens": 16, "page_tokens": 4},
    "page128": {"page_tokens": 128, "step_tokens": 33},
    "alone_poisoned": {"max_sequences": 1, "poison": True},
    "tight_poisoned": {"cache_tokens": 144, "poison": True},
    "tight_no_prefix": {"cache_tokens": 144, "prefix_cache": False, "step_tokens": 50},
}


@pytest.mark.parametrize("options", SCHEDULES.values(), ids=SCHEDULES)
def test_a08_decode_prefill_training(
    model: Any, expected: Any, bits: Any, options: dict[str, Any]
) -> None:
    engine = um.Engine(model, **options)
    ids, logprobs = expected
    given = prompts(*LENGTHS)
    outs = engine.generate(given, SAMPLING)
    assert [out.ids for out in outs] == ids
    if "cache_tokens" in options:
        assert engine.stats.preemptions > 0
    compared = sum(bits(out.logprobs, lps) for out, lps in zip(outs, logprobs, strict=True))
    scored = engine.score([p + i for p, i in zip(given, ids, strict=True)], temperature=0.8)
    for prompt, lps, got in zip(given, logprobs, scored, strict=True):
        compared += bits(got[len(prompt) - 1 :], lps)
    assert compared == 2 * 4 * 18


@pytest.mark.parametrize("numerics", ["deployed", "float32"])
def test_a08_whole_sequences(folders: Any, bits: Any, numerics: str) -> None:
    model = um.load(folders[0], numerics=numerics)
    given = prompts(2, 3, 4, 127, 128, 129, 140)
    engine = um.Engine(model, step_tokens=61)
    outs = engine.generate(given, um.Sampling(max_tokens=4, temperature=0))
    sequences = [[*prompt, *out.ids] for prompt, out in zip(given, outs, strict=True)]
    with torch.no_grad():
        expected = um.logprobs(model, sequences)
    scored = engine.score(sequences)
    compared = sum(bits(a, b) for a, b in zip(scored, expected, strict=True))
    compared += sum(bits(o.logprobs, b[-4:]) for o, b in zip(outs, expected, strict=True))
    assert compared == sum(len(s) - 1 for s in sequences) + 4 * 7


@pytest.mark.parametrize("length", [15, 16, 17, 32, 300])
def test_b01_c21_warm_equals_cold(model: Any, bits: Any, length: int) -> None:
    given = prompts(length)
    engine = um.Engine(model, poison=True, step_tokens=128)
    runs = [engine.generate(given, um.Sampling(max_tokens=4))[0] for _ in range(3)]
    (lps,) = trained(model, given, runs[:1], 1.0)
    assert sum(bits(run.logprobs, lps) for run in runs) == 12
    assert engine.stats.prefix_hits == 2 * ((length - 1) // 16 * 16)


def test_b06_long_after_short(model: Any, bits: Any) -> None:
    """Far more entries than the indexer picks, after a short prompt."""
    engine = um.Engine(model, step_tokens=200)
    for length in (16, 4 * 4 * 16 + 5):
        given = prompts(length)
        outs = engine.generate(given, um.Sampling(max_tokens=3))
        (lps,) = trained(model, given, outs, 1.0)
        assert bits(outs[0].logprobs, lps) == 3


def pointers(model: Any) -> dict[str, int]:
    """The address of everything that a forward reads."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.data_ptr() for name, tensor in named}


def test_a25_a31_a23_update_in_place(model: Any, other: Any, bits: Any) -> None:
    """After an update the engine is a fresh one of the new weights, at the old addresses."""
    given = prompts(50, 33)
    sampling = um.Sampling(max_tokens=5)
    engine = um.Engine(model)
    before = engine.generate(given, sampling)
    where = pointers(model)
    original = [(name, tensor.clone()) for name, tensor in um.named_tensors(model)]
    engine.update_weights(um.named_tensors(other))
    outs = engine.generate(given, sampling)
    fresh = um.Engine(other).generate(given, sampling)
    assert [out.ids for out in outs] == [out.ids for out in fresh]
    compared = sum(bits(a.logprobs, b.logprobs) for a, b in zip(outs, fresh, strict=True))
    engine.update_weights(original, version=7)
    back = engine.generate(given, sampling)
    compared += sum(bits(a.logprobs, b.logprobs) for a, b in zip(back, before, strict=True))
    assert compared == 20
    assert [run[0].versions for run in (before, outs, back)] == [[0] * 5, [1] * 5, [7] * 5]
    assert before[0].logprobs.tolist() != outs[0].logprobs.tolist()
    assert pointers(model) == where and len(where) > 50
    assert engine.stats.prefix_hits == 0


def test_a07_twenty_rounds_of_the_same_weights(model: Any, bits: Any) -> None:
    given = prompts(20, 5)
    engine = um.Engine(model)
    first = engine.generate(given, um.Sampling(max_tokens=2))
    expected = trained(model, given, first, 1.0)
    for sync in range(1, 21):
        engine.update_weights([(name, t.clone()) for name, t in um.named_tensors(model)])
        outs = engine.generate(given, um.Sampling(max_tokens=2))
        compared = sum(bits(a.logprobs, b) for a, b in zip(outs, expected, strict=True))
        assert compared == 4, f"round {sync}"
        assert outs[0].versions == [sync] * 2
    assert engine.stats.weight_version == engine.stats.updates == 20


@pytest.mark.parametrize("fault", ["missing", "unknown", "shape"])
def test_a24_a_partial_update_changes_nothing(
    model: Any, other: Any, bits: Any, fault: str
) -> None:
    given = prompts(20)
    engine = um.Engine(model)
    before = engine.generate(given, um.Sampling(max_tokens=3))[0]
    tensors = list(um.named_tensors(other))
    name, tensor = tensors.pop()
    if fault == "unknown":
        tensors += [(name, tensor), ("model.nothing", tensor)]
    elif fault == "shape":
        tensors.append((name, tensor[:-1]))
    with pytest.raises(ValueError, match="model.nothing" if fault == "unknown" else name):
        engine.update_weights(tensors)
    after = engine.generate(given, um.Sampling(max_tokens=3))[0]
    assert after.ids == before.ids and bits(after.logprobs, before.logprobs) == 3
    assert engine.stats.weight_version == 0 and after.versions == [0] * 3


def test_a31_updates_while_requests_run(model: Any, other: Any, bits: Any) -> None:
    """Each sampled token has the bits of the training forward of its version, over its whole prefix."""
    weights = {
        0: [(n, t.clone()) for n, t in um.named_tensors(model)],
        1: [(n, t.clone()) for n, t in um.named_tensors(other)],
    }
    engine = um.Engine(model, step_tokens=32, poison=True)
    given = prompts(30, 7)
    requests = [
        engine.submit(prompt, um.Sampling(max_tokens=14), i) for i, prompt in enumerate(given)
    ]
    for version in (1, 2):
        for _ in range(5):
            engine.step()
        engine.update_weights(weights[version % 2])
    engine.run()
    outs = [request.output() for request in requests]
    assert engine.stats.tokens_recomputed > 0
    compared = 0
    for version in (0, 1, 2):
        um.Engine(model).update_weights(weights[version % 2])
        for out, lps in zip(outs, trained(model, given, outs, 1.0), strict=True):
            mine = torch.tensor(out.versions) == version
            compared += bits(out.logprobs[mine], lps[mine])
    assert compared == 28


def test_an_optimizer_step_in_this_process_is_an_update(model: Any, bits: Any) -> None:
    given = prompts(40)
    engine = um.Engine(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.commit_after(optimizer)
    versions, seen = [], []
    for _ in range(3):
        outs = engine.generate(given, um.Sampling(max_tokens=4))
        (lps,) = trained(model, given, outs, 1.0)
        assert bits(outs[0].logprobs, lps) == 4
        versions.append(outs[0].versions)
        seen.append(outs[0].logprobs.tolist())
        (new,) = um.logprobs(model, [[*given[0], *outs[0].ids]])
        (-new[-4:].sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert versions == [[0] * 4, [1] * 4, [2] * 4]
    assert seen[0] != seen[1] != seen[2]
    assert engine.stats.prefix_hits == 0
