"""The comparison with real vLLM can fail: one ulp, another version, nothing compared. No vLLM is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import unified_models as um
from unified_models.adapters.vllm.verify import Load, Out, Report, compare, versions

PROMPTS = [[1, 2, 3], [7] * 20, [5, 6]]
LOAD = Load(requests=3, tokens=4)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    um.make_tiny("qwen3", folder)
    return versions(folder, LOAD, "deployed")


def outputs(models: list[Any]) -> list[Any]:
    """As vLLM gives them: request i was sampled under version i."""
    outs = []
    for version, (model, prompt) in enumerate(zip(models, PROMPTS, strict=True)):
        sampling = um.Sampling(LOAD.tokens, temperature=LOAD.temperature)
        (out,) = um.Engine(model).generate([prompt], sampling)
        rows = [
            {token: SimpleNamespace(logprob=value)}
            for token, value in zip(out.ids, out.logprobs.tolist(), strict=True)
        ]
        name = str(version) if version else "default"
        span = SimpleNamespace(version=name, start=0, end=len(out.ids))
        done = SimpleNamespace(token_ids=out.ids, logprobs=rows, weight_versions=[span])
        ends = [0] * version + [len(out.ids)] * (len(models) - version)
        outs.append(Out(done, ends, 0))
    return outs


def report_of(models: list[Any], outs: list[Any]) -> Report:
    report = Report("folder", "0", least=LOAD.least, preemptions=1, cached=1)
    compare(models, PROMPTS, outs, LOAD, report)
    return report


def test_equal_bits_pass(models: list[Any]) -> None:
    report = report_of(models, outputs(models))
    assert report.ok, report.problems()
    assert [row.compared for row in report.trained] == [4, 4, 4]


def test_one_ulp_of_one_token_fails_and_is_named(models: list[Any]) -> None:
    outs = outputs(models)
    entry = next(iter(outs[1].told.logprobs[2].values()))
    flipped = torch.tensor([entry.logprob], dtype=torch.float32).view(torch.int32) ^ 1
    entry.logprob = flipped.view(torch.float32).item()
    report = report_of(models, outs)
    assert [row.unequal for row in report.trained] == [0, 1, 0]
    assert [row.unequal for row in report.served] == [0, 1, 0]
    told = report.problems()
    assert len(told) == 2 and all("version 1 against" in line for line in told)
    assert all("1 of 4 unequal, first at [0, 2]" in line for line in told)


def test_tokens_of_another_version_fail(models: list[Any]) -> None:
    outs = outputs(models)
    outs[2].ends[1] = 4
    told = report_of(models, outs).problems()
    assert any("version 1 against training: 4 of 8 unequal" in line for line in told), told
    assert "1 requests whose weight versions vLLM counts otherwise" in told


def test_nothing_compared_fails(models: list[Any]) -> None:
    outs = outputs(models)
    for out in outs:
        out.ends[:], out.told.weight_versions = [0, 0, 0], []
    told = report_of(models, outs).problems()
    assert f"0 tokens compared, {LOAD.least} wanted" in told


@pytest.mark.parametrize("name", ["preemptions", "cached"])
def test_what_must_happen_and_did_not_fails(models: list[Any], name: str) -> None:
    report = report_of(models, outputs(models))
    setattr(report, name, 0)
    assert report.problems() == [f"no {name}"]


def test_an_empty_report_fails() -> None:
    assert not Report("folder", "0", least=1).ok
