"""The gradient of logprobs by its kernel, at the size of real vocabularies: against float64, and against torch's."""

import pytest
import torch

from tests.ops.conftest import compare_bits, nothing_waits
from tests.ops.triton_logprob_backward_child import compare, compare_hard, ends, hard
from unified_models.ops import logprob

SIZES = [(300, 131072), (33, 129280), (9, 50257), (2, 3)]


@pytest.mark.parametrize("divided", [True, False], ids=["T", "1"])
@pytest.mark.parametrize(("T", "V"), SIZES)
def test_logprobs(T: int, V: int, divided: bool) -> None:
    """torch's forward bit by bit; a gradient that is float64's, the same again, and waits for nothing."""
    logits, ids_T = 4 * torch.randn(T, V, device="cuda"), ends(T, V).cuda()
    dlp_T = torch.randn(T, device="cuda")
    dlp_T[::7] = 0
    temperature_T = (0.5 + 1.5 * torch.rand(T)).cuda() if divided else None
    leaf, other = (logits.clone().requires_grad_() for _ in range(2))
    lps = logprob.logprobs(leaf, temperature_T, ids_T)
    want = logprob.elements(other, temperature_T, ids_T, "torch_row")
    assert compare_bits(lps.detach(), want.detach(), "logprobs") == T
    (first,) = torch.autograd.grad(lps, leaf, dlp_T, retain_graph=True)
    with nothing_waits():
        (again,) = torch.autograd.grad(lps, leaf, dlp_T)
        lps = logprob.logprobs(leaf, temperature_T, ids_T, known_T=lps.detach())
        (known,) = torch.autograd.grad(lps, leaf, dlp_T)
    assert compare_bits((again, known), (first, first), "again") == 2 * T * V
    (theirs,) = torch.autograd.grad(want, other, dlp_T)
    torch.testing.assert_close(first, theirs, rtol=1e-4, atol=1e-5)
    assert compare(first, dlp_T, logits, temperature_T, ids_T) == T
    assert not first[::7].any()


@pytest.mark.parametrize("V", [131072, 50257])
def test_hard_rows(V: int) -> None:
    """Huge logits, ids far below the others, -inf: no NaN. torch's own gradient passes, too."""
    logits, ids_T = hard(V)
    for temperature_T in (None, torch.tensor([0.5, 1.0, 2.0]).repeat(3)):
        leaf = logits.cuda().requires_grad_()
        at = None if temperature_T is None else temperature_T.cuda()
        for lps in (
            logprob.logprobs(leaf, at, ids_T.cuda()),
            logprob.elements(leaf, at, ids_T.cuda(), "torch_row"),
        ):
            (got,) = torch.autograd.grad(lps.sum(), leaf)
            assert compare_hard(got.cpu(), logits, temperature_T, ids_T) == 9


def test_rows_apart() -> None:
    """Logits that are part of longer rows, upstream gradients that are one number."""
    memory, ids_T = torch.full((5, 5000), torch.nan, device="cuda"), ends(5, 4097).cuda()
    memory[:, :4097] = torch.randn(5, 4097, device="cuda")
    leaf = memory[:, :4097].requires_grad_()
    (got,) = torch.autograd.grad(logprob.logprobs(leaf, None, ids_T).sum(), leaf)
    assert compare(got, torch.ones(5, device="cuda"), leaf, None, ids_T) == 5
