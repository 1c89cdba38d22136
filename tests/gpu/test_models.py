"""Whole tiny models on a GPU: against the CPU by a tolerance, and against themselves by bits, in real vLLM as well."""

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

import unified_models as um
from unified_models.adapters.vllm import plugin
from unified_models.outside import run_adapter

TINY = Path(__file__).parents[2] / "configs/tiny"
MODELS = {
    "deepseek_v4": {},
    "nemotron_h": {"config": TINY / "nemotron_h_mixed.json"},
    "qwen3": {},
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp("gpu") / name
            um.make_tiny(name, made[name], seed=2, **MODELS[name])
        return made[name]

    return make


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_gradients_are_those_of_the_cpu(name: str, checkpoint) -> None:
    random = Random(0)
    sequences = [[random.randrange(512) for _ in range(n)] for n in (1, 2, 17, 64, 129, 300)]
    sides = {}
    for device in ("cpu", "cuda"):
        model = um.load(checkpoint(name), device=device, numerics="float32", progress=False)
        lps = torch.cat(um.logprobs(model, sequences))
        lps.mean().backward()
        grads = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        sides[device] = lps.detach().cpu(), grads
    (lps, grads), (others, other_grads) = sides["cpu"], sides["cuda"]
    assert len(lps) == 507 and grads and grads.keys() == other_grads.keys()
    print(f"{name}: logprobs differ by {(lps - others).abs().max():.1e}")
    torch.testing.assert_close(others, lps, rtol=0, atol=2e-4)
    for key, want in grads.items():
        scale = want.abs().max().clamp_min(1e-6)
        assert (other_grads[key] - want).abs().max() <= 1e-3 * scale, key


@pytest.mark.parametrize("name", MODELS)
def test_every_schedule_gives_the_same_bits(name: str, checkpoint) -> None:
    report = um.verify.verify_folder(
        checkpoint(name), numerics=("deployed",), quick=True, progress=False, device="cuda"
    )
    assert report.ok and report.total.compared > 1000, report.table()
    print(f"{name}: {report.total.compared} tokens, {report.total.unequal} unequal")


@pytest.mark.parametrize("name", ["nemotron_h", "deepseek_v4"])
def test_vllm_samples_the_bits_of_the_training_forward(name: str, checkpoint) -> None:
    if plugin.found() is None:
        pytest.skip("vLLM is not installed")
    assert run_adapter("vllm.verify", checkpoint(name), "deployed", 0) == 0
