"""The baseline computes the same function as the exact context, up to rounding, and has its gradients."""

from pathlib import Path

import pytest
import torch

import unified_models as um
from unified_models.context.local import LocalContext
from unified_models.context.plain import PlainContext
from unified_models.model import LanguageModel

SEQUENCES = [list(range(3, 140)), [5, 6, 7, 8, 9, 10], list(range(200, 230))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    folder: Path = tmp_path_factory.mktemp("plain") / "m"
    um.make_tiny("deepseek_v4", folder, num_hidden_layers=4)
    return um.load(folder, numerics="float32")


def test_plain_is_close_to_exact(model: LanguageModel) -> None:
    """float32: sums of up to 1024 terms, in another order, through four layers."""
    with torch.no_grad():
        exact = torch.cat(um.logprobs(model, SEQUENCES))
        plain = torch.cat(um.logprobs(model, SEQUENCES, context=PlainContext))
    assert len(exact) == 136 + 5 + 29
    torch.testing.assert_close(plain, exact, rtol=0, atol=1e-4)


def test_plain_gradients(model: LanguageModel) -> None:
    grads = []
    for context in (LocalContext, PlainContext):
        model.zero_grad()
        torch.cat(um.logprobs(model, SEQUENCES, context=context)).mean().backward()
        grads.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad})
    assert grads[0].keys() == grads[1].keys()
    for name, exact in grads[0].items():
        assert float((grads[1][name] - exact).norm()) <= 1e-3 * float(exact.norm()) + 1e-7, name


def test_plain_without_gradients_reads_the_same_weights(model: LanguageModel) -> None:
    """The values that are kept between steps follow a commit."""
    for change in (0.0, 0.5):
        with torch.no_grad():
            model.head.master.add_(change)
            model.commit()
            kept = torch.cat(um.logprobs(model, SEQUENCES, context=PlainContext))
        fresh = torch.cat(um.logprobs(model, SEQUENCES, context=PlainContext)).detach()
        assert um.verify.bits(kept, fresh).unequal == 0
