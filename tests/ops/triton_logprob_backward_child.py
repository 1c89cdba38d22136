"""The gradient of logprobs in Triton's interpreter: `TRITON_INTERPRET=1 python -m
tests.ops.triton_logprob_backward_child`.

Against float64 autograd of the reference, on poisoned memory, of rows that lie among NaN; and `um.logprobs` of a tiny
model through it, whose bits are those without it.
"""

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import unified_models as um
from tests.conftest import poisoning
from tests.ops.conftest import EPS, compare_bits
from tests.ops.triton_grouped_backward_child import among_nan
from unified_models.ops import logprob
from unified_models.ops.logprob import backward_triton as kernels
from unified_models.ops.logprob.reference import logprobs as reference

RELATIVE = 4e-5
"""Of a probability: six roundings to float32 of exponents down to -100."""
POWERS = torch.tensor([0.5, 1.0, 2.0])
"""Temperatures by which a division is exact, however large the logits."""


def compare(
    got: Tensor, dlp_T: Tensor, logits_TV: Tensor, temperature_T: Tensor | None, ids_T: Tensor
) -> int:
    """Every value against float64; the number of rows."""
    ones = torch.ones(len(ids_T), device=ids_T.device)
    wide = (ones if temperature_T is None else temperature_T).double()
    leaf = logits_TV.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(reference(leaf, wide, ids_T), leaf, dlp_T.double())
    p = torch.softmax(leaf.detach() / wide[:, None], -1)
    hit = torch.zeros_like(p).scatter_(1, ids_T[:, None], 1.0)
    bound = (RELATIVE * p + 4 * EPS * (hit + p)) * (dlp_T.double().abs() / wide)[:, None] + 1e-30
    assert (got.dtype, got.shape) == (logits_TV.dtype, logits_TV.shape)
    assert bool(want.isfinite().all() and (want != 0).any() and got.isfinite().all())
    worst = ((got.double() - want).abs() / bound).max()
    assert worst <= 1, f"{tuple(got.shape)}: {float(worst):.3g} times the bound"
    return len(got)


def ends(T: int, V: int) -> Tensor:
    """Ids, the first and the last of the vocabulary among them."""
    ids_T = torch.randint(0, V, (T,))
    ids_T[0], ids_T[-1] = V - 1, 0
    return ids_T


def backward(
    dlp_T: Tensor, logits_TV: Tensor, temperature_T: Tensor | None, ids_T: Tensor
) -> Tensor:
    lps_T = logprob.logprobs(logits_TV.contiguous(), temperature_T, ids_T)
    return kernels.logprobs_backward(dlp_T, logits_TV, temperature_T, ids_T, lps_T)


def check_sizes() -> int:
    """Whole blocks and parts of them, rows apart, upstream gradients of zero, one for all, and apart."""
    count = 0
    for T, V in ((5, 2), (7, 33), (3, 1000), (4, 4096), (3, 4097), (2, 9001)):
        logits, ids_T = among_nan(4 * torch.randn(T, V)), ends(T, V)
        given = torch.randn(2 * T)
        given[2] = 0
        dlps = given[::2], torch.full((1,), 0.3).expand(T)
        for temperature_T in (None, torch.ones(T), 0.5 + 1.5 * torch.rand(T)):
            for dlp_T in dlps:
                got = backward(dlp_T, logits, temperature_T, ids_T)
                count += compare(got, dlp_T, logits, temperature_T, ids_T)
            assert not dlps[0][1] and not backward(dlps[0], logits, temperature_T, ids_T)[1].any()
        compare_bits(
            backward(dlps[0], logits, torch.ones(T), ids_T),
            backward(dlps[0], logits, None, ids_T),
            "a temperature of 1",
        )
        got = backward(dlps[0], logits, None, ids_T)
        for t in range(T):
            row = slice(t, t + 1)
            alone = backward(dlps[0][row], logits[row], None, ids_T[row])
            compare_bits(alone, got[row], "a row alone")
    assert backward(torch.ones(0), torch.ones(0, 5), None, torch.ones(0).long()).shape == (0, 5)
    return count


def hard(V: int) -> tuple[Tensor, Tensor]:
    """Rows and ids: huge logits, one far above the rest, ids far below the rest, and logits of -inf."""
    logits = torch.randn(9, V)
    ids_T = ends(9, V)
    logits[0] *= 1e4
    logits[1] *= 1e30
    ids_T[1] = logits[1].argmax()
    logits[2, 0], ids_T[2] = 200.0, 1
    logits[3, 1], ids_T[3] = -1e30, 1
    logits[4, V - 1], ids_T[4] = -math.inf, V - 1
    logits[5, :-1], ids_T[5] = -math.inf, V - 1
    logits[6, ::2], ids_T[6] = -math.inf, 1
    logits[7] += 1e6
    logits[8] = 0
    return logits, ids_T


def check_hard_rows() -> int:
    """The control: without a look for the largest logit, ids far below it have another gradient."""
    count = 0
    for V in (40, 4097, 8195):
        logits, ids_T = hard(V)
        for temperature_T in (None, POWERS.repeat(3)):
            got = backward(torch.ones(9), logits, temperature_T, ids_T)
            count += compare_hard(got, logits, temperature_T, ids_T)
    right = backward(torch.ones(9), logits, None, ids_T)
    far, kernels.FAR = kernels.FAR, -math.inf
    wrong = backward(torch.ones(9), logits, None, ids_T)
    kernels.FAR = far
    near = ((wrong - right).abs() < 0.1).all(-1)  # NaN is not
    assert not near[3] and not near[4] and near[[1, 5, 6, 7, 8]].all(), near
    broken = logits.clone()
    broken[0, 3] = math.nan
    again = backward(torch.ones(9), broken, None, ids_T)
    assert bool(again[0].isnan().all())
    compare_bits(again[1:], right[1:], "next to NaN")
    return count


def compare_hard(got: Tensor, logits: Tensor, temperature_T: Tensor | None, ids_T: Tensor) -> int:
    """Against float64's own log_softmax, since the reference takes -inf from -inf."""
    wide = (torch.ones(len(ids_T)) if temperature_T is None else temperature_T).double()
    leaf = logits.double().requires_grad_()
    lps = torch.log_softmax(leaf / wide[:, None], -1).gather(1, ids_T[:, None])
    (want,) = torch.autograd.grad(lps.sum(), leaf)
    assert bool(want.isfinite().all() and got.isfinite().all())
    torch.testing.assert_close(got.double(), want, rtol=RELATIVE, atol=4 * EPS)
    return len(got)


def check_function() -> int:
    """What sends gradients through the kernel; asked again with the answer, it computes no softmax."""
    logits, temperature_T = 3 * torch.randn(6, 100), 0.5 + torch.rand(6)
    ids_T, dlp_T = ends(6, 100), torch.randn(6)
    want, count = logprob.logprobs(logits, temperature_T, ids_T), 0
    for known_T in (None, want):
        leaf = logits.clone().requires_grad_()
        with Switched() as calls:
            lps = logprob.logprobs(leaf, temperature_T, ids_T, known_T=known_T)
            (got,) = torch.autograd.grad(lps, leaf, dlp_T)
        assert calls == [6] * (known_T is None)
        compare_bits(lps.detach(), want, "logprobs")
        count += compare(got, dlp_T, logits, temperature_T, ids_T)
    return count


class Switched:
    """The kernel stands for CPU's backward; the rows of every log_softmax are told."""

    def __enter__(self) -> list[int]:
        self.kept: dict[str, Any] = {n: getattr(logprob, n) for n in ("by_kernel", "log_softmax")}
        rows: list[int] = []

        def told(logits_TV: Tensor, *args: Any, **kwargs: Any) -> Any:
            rows.append(len(logits_TV))
            return self.kept["log_softmax"](logits_TV, *args, **kwargs)

        vars(logprob).update(by_kernel=lambda _: True, log_softmax=told)
        return rows

    def __exit__(self, *_: object) -> None:
        vars(logprob).update(self.kept)


def check_training() -> int:
    """A tiny model's logprobs keep their bits; its gradients, twice from one graph, are those without the kernel. One
    log_softmax a chunk, none in a backward."""
    count, pack = 0, [[3, 1, 4, 1, 5, 9], [], [2, 6, 5]]
    with tempfile.TemporaryDirectory() as folder:
        um.make_tiny("qwen3", Path(folder) / "m", seed=3)
        model = um.load(Path(folder) / "m", progress=False)
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    leaves = [p for p in model.parameters() if p.requires_grad]
    for temperature in (1.0, [0.7, 1.0, 1.3]):
        plain = torch.cat(um.logprobs(model, pack, temperature, rows=3))
        dlp = torch.randn(len(plain))
        wants = torch.autograd.grad(plain, leaves, dlp)
        with Switched() as calls:
            lps = torch.cat(um.logprobs(model, pack, temperature, rows=3))
            first = torch.autograd.grad(lps, leaves, dlp, retain_graph=True)
            again = torch.autograd.grad(lps, leaves, dlp)
        assert calls == [3, 3, 1]
        compare_bits(lps.detach(), plain.detach(), "logprobs")
        compare_bits(again, first, "from one graph")
        for name, got, want in zip(names, first, wants, strict=True):
            assert bool(want.any()), name
            scale = float(want.abs().max())
            torch.testing.assert_close(got, want, rtol=2**-7, atol=2**-7 * scale, msg=name)
            count += 1
    return count


def main() -> None:
    torch.manual_seed(0)
    torch.empty = poisoning(torch.empty)
    count = check_sizes() + check_hard_rows() + check_function() + check_training()
    print(f"{count} calls agree")


if __name__ == "__main__":
    main()
