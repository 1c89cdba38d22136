"""Hyper-connections: maps, Sinkhorn, and the mixes, with the source in the row and the target in the column."""

import pytest
import torch
from torch import Tensor

from unified_models.ops import hyper_collapse, hyper_expand, hyper_maps, hyper_normalize
from unified_models.ops.hyper_connect import reference as plain
from unified_models.ops.hyper_connect import sinkhorn

X, M = 4, 24
EPS = 1e-6


def random_maps(tokens: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """streams, fn, scale, base"""
    C = X * (2 + X)
    fn_CK = torch.randn(C, X * M) / (X * M) ** 0.5
    return torch.randn(tokens, X, M), fn_CK, torch.randn(3), torch.randn(C)


def maps(streams: Tensor, fn: Tensor, scale: Tensor, base: Tensor, iterations: int) -> tuple:
    mixes = hyper_normalize(streams.float().flatten(1) @ fn.T, streams, EPS)
    return hyper_maps(mixes, scale, base, streams=X, iterations=iterations, eps=EPS)


@pytest.mark.parametrize("iterations", [1, 20])
def test_maps_and_backward_C22(check_gradients, iterations: int) -> None:
    names = ("streams", "fn", "scale", "base")
    leaves = {n: t.requires_grad_() for n, t in zip(names, random_maps(7), strict=True)}
    check_gradients(
        lambda: maps(*leaves.values(), iterations),
        lambda streams, fn, scale, base: plain.maps(
            streams, fn, scale, base, iterations=iterations, eps=EPS, norm_eps=EPS
        ),
        leaves,
        terms=X * M + 8 * iterations,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_collapse_and_expand_and_backward(check_gradients, dtype: torch.dtype) -> None:
    streams = torch.randn(7, X, M).to(dtype).requires_grad_()
    out = torch.randn(7, M).to(dtype).requires_grad_()
    pre, post, comb = (torch.rand(7, *s).requires_grad_() for s in ((X,), (X,), (X, X)))
    collapsed = {"streams": streams, "pre": pre}
    check_gradients(
        lambda: hyper_collapse(streams, pre),
        lambda streams, pre: plain.collapse(streams, pre),
        collapsed,
        terms=M,
    )
    check_gradients(
        lambda: hyper_expand(out, streams, post, comb),
        lambda out, streams, post, comb: plain.expand(out, streams, post, comb),
        {"out": out, "streams": streams, "post": post, "comb": comb},
        terms=M,
    )


def test_reference_gradient_by_finite_differences() -> None:
    streams, fn, scale, base = (t.double().requires_grad_() for t in random_maps(2))
    assert torch.autograd.gradcheck(
        lambda *args: plain.maps(*args, iterations=3, eps=EPS, norm_eps=EPS),
        (streams, fn, scale, base),
    )
    post, comb = (torch.rand(2, *s).double().requires_grad_() for s in ((X,), (X, X)))
    out = torch.randn(2, M).double().requires_grad_()
    assert torch.autograd.gradcheck(plain.expand, (out, streams, post, comb))
    assert torch.autograd.gradcheck(plain.collapse, (streams, post))


@pytest.mark.parametrize("width", [5, 64])
def test_rows_keep_their_bits(check_rows, width: int) -> None:
    _, _, scale, base = random_maps(1)
    streams, out = torch.randn(150, X, width), torch.randn(150, width)
    projected = torch.randn(150, X * (2 + X))
    count = check_rows(lambda p, s: hyper_normalize(p, s, EPS), projected, streams)
    count += check_rows(
        lambda m: hyper_maps(m, scale, base, streams=X, iterations=20, eps=EPS), projected
    )
    pre, comb = torch.rand(150, X), torch.rand(150, X, X)
    count += check_rows(hyper_collapse, streams, pre)
    count += check_rows(hyper_expand, out, streams, pre, comb)
    assert count > 0


def test_equal_streams_are_as_good_as_copies(same_bits) -> None:
    """The embedding is expanded, not copied, to X streams."""
    x, projected = torch.randn(9, M).bfloat16(), torch.randn(9, 24)
    views, copies = x[:, None].expand(-1, X, -1), x[:, None].repeat(1, X, 1)
    pre = torch.rand(9, X)
    count = same_bits(
        hyper_normalize(projected, views, EPS), hyper_normalize(projected, copies, EPS), "norm"
    )
    count += same_bits(hyper_collapse(views, pre), hyper_collapse(copies, pre), "collapse")
    assert count > 0


def test_expand_takes_the_row_as_source_C22() -> None:
    """A mix that is not symmetric: stream j gets sum_i B[i, j] X_i, which is B^T X."""
    comb = torch.arange(16.0).view(1, X, X)
    streams = torch.eye(X).view(1, X, X)
    got = hyper_expand(torch.zeros(1, X), streams, torch.zeros(1, X), comb)
    assert torch.equal(got[0], comb[0].T @ streams[0])
    assert not torch.equal(got[0], comb[0] @ streams[0])
    source = torch.zeros(1, X, X)
    source[0, 1, 2] = 1.0  # from stream 1 to stream 2
    moved = hyper_expand(torch.zeros(1, X), streams, torch.zeros(1, X), source)
    assert torch.equal(moved[0].nonzero(), torch.tensor([[2, 1]]))


@pytest.mark.parametrize("iterations", [1, 20])
def test_sinkhorn_sums_C22(iterations: int) -> None:
    """Columns are last, so they sum to 1 but for eps over the sum before, which is 0.1 at least here; rows only
    nearly: within 1e-3 after 20 iterations of N(0, 1) logits, and visibly not after one."""
    comb = sinkhorn(torch.randn(200, X, X), iterations, EPS)
    assert bool(((comb.sum(-2) - 1).abs() <= 10 * EPS).all())
    worst = float((comb.sum(-1) - 1).abs().max())
    assert worst <= 1e-3 if iterations == 20 else worst > 1e-2


@pytest.mark.parametrize("iterations", [1, 20])
def test_large_logits_and_backward_C22(check_gradients, iterations: int) -> None:
    """Logits of +-80, and a row of equal ones: no NaN, and the values of float64."""
    mixes = torch.zeros(3, 24)
    mixes[0, 8:] = torch.tensor([80.0, -80.0] * 8)
    mixes[1, 8:] = torch.randint(0, 2, (16,)) * 160.0 - 80
    mixes[2, :8] = torch.tensor([80.0, -80.0] * 4)
    mixes.requires_grad_()
    got = hyper_maps(
        mixes, torch.ones(3), torch.zeros(24), streams=X, iterations=iterations, eps=EPS
    )
    assert all(bool(t.isfinite().all()) for t in got)
    (grad,) = torch.autograd.grad(sum(t.square().sum() for t in got), mixes)
    assert bool(grad.isfinite().all())
    wide = sinkhorn(mixes[:, 8:].detach().double().unflatten(-1, (X, X)), iterations, EPS)
    assert torch.allclose(got[2].double(), wide, atol=1e-5)
