"""The baseline learns by real gradients: quantised inputs pass them straight through there, too."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

import unified_models as um
from unified_models.context import plain
from unified_models.context.local import LocalContext
from unified_models.rl.config import Config
from unified_models.rl.recipe import load_start
from unified_models.weight import Reading

SEQUENCES = [list(range(3, 60)), [5, 6, 7, 8, 9, 10], list(range(200, 230))]


def test_baseline_gradients_of_fp8_linears(
    small: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All gradients together point where the exact context's do (0.97; routing flips, and bf16 in the backward, are
    the rest). Control: autograd through the FP8 codes rounds gradients to FP8, and most become 0 (0.22)."""
    model = load_start(small("deepseek_v4"), tmp_path)

    def gradients(context: type) -> tuple[Tensor, Tensor]:
        model.zero_grad()
        lps = torch.cat(um.logprobs(model, SEQUENCES, context=context))
        lps.mean().backward()
        found = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
        return lps.detach(), torch.cat(found).clone()

    _, exact = gradients(LocalContext)
    lps, fixed = gradients(plain.PlainContext)
    assert float(torch.cosine_similarity(exact, fixed, 0)) > 0.9
    assert float(fixed.norm() / exact.norm()) == pytest.approx(1, abs=0.1)

    def through_the_codes(reading: Reading, x: Tensor, index: int | None = None) -> Tensor:
        return x if reading.format.input == "plain" else reading.seen(x, index)

    monkeypatch.setattr(plain, "seen", through_the_codes)
    same, broken = gradients(plain.PlainContext)
    assert torch.equal(same, lps), "the fix is of the gradient alone"
    assert float(torch.cosine_similarity(exact, broken, 0)) < 0.5
