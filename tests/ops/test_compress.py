"""compress: one entry a window, softmax over its tokens channel by channel, then norm and rope."""

import math

import pytest
import torch
from torch import Tensor

from unified_models import ops
from unified_models.ops import Rope
from unified_models.ops.compress import compress
from unified_models.ops.compress.reference import pool
from unified_models.ops.rms_norm.reference import rms_norm
from unified_models.ops.rope import frequencies
from unified_models.ops.rope.reference import rope

ROPE = Rope(8, 10000.0)
EPS = 1e-6


def windows(stride: int, span: int, count: int) -> Tensor:
    """Windows of one sequence at rows 3, 4, ..; the first of overlapping ones begins before the sequence."""
    last_U = (torch.arange(count) + 1) * stride - 1
    seen = last_U[:, None] + torch.arange(1 - span, 1)
    return torch.where(seen < 0, -1, seen + 3)


def reference(open_RC: Tensor, norm: Tensor, index_UP: Tensor, dim: int, stride: int) -> Tensor:
    """Window by window, row by row: a row of an overlapping window's older half gives its first channels."""
    values, gates = open_RC.chunk(2, -1)
    entries = []
    for index in index_UP.tolist():
        vs, gs = [], []
        for place, row in enumerate(index):
            if row < 0:
                continue
            old = values.shape[-1] == dim or place < len(index) // 2
            channels = slice(0, dim) if old else slice(dim, 2 * dim)
            vs.append(values[row, channels])
            gs.append(gates[row, channels])
        entries.append(pool(torch.stack(vs), torch.stack(gs)))
    positions_U = torch.arange(len(index_UP)) * stride
    normed = rms_norm(torch.stack(entries), norm, EPS)
    return rope(normed, positions_U, frequencies(ROPE, torch.device("cpu")))


CASES = [(4, 8, 12), (4, 8, 33), (8, 8, 20), (128, 128, 12)]


@pytest.mark.parametrize(("stride", "span", "dim"), CASES, ids=str)
def test_compress_and_backward(check_gradients, stride: int, span: int, dim: int) -> None:
    count = 3
    channels = dim * span // stride
    open_RC = torch.randn(3 + count * stride + 2, 2 * channels).requires_grad_()
    norm = (1 + 0.2 * torch.randn(dim)).requires_grad_()
    index_UP = windows(stride, span, count)
    positions_U = torch.arange(count) * stride
    check_gradients(
        lambda: compress(
            open_RC, index_UP, dim=dim, norm=norm, eps=EPS, positions_U=positions_U, rope_=ROPE
        ),
        lambda open_RC, norm: reference(open_RC, norm, index_UP, dim, stride),
        {"open_RC": open_RC, "norm": norm},
        terms=4 * (span + dim),
    )


def test_reference_gradient_by_finite_differences() -> None:
    values, gates = (torch.randn(5, 3, dtype=torch.float64, requires_grad=True) for _ in "vg")
    assert torch.autograd.gradcheck(pool, (values, gates))


@pytest.mark.parametrize(("stride", "span", "dim"), CASES, ids=str)
def test_windows_keep_their_bits(check_rows, stride: int, span: int, dim: int) -> None:
    """Packs of windows over the same rows, of which one is NaN and in no window."""
    open_RC = torch.randn(3 + 150 * stride, 2 * dim * span // stride)
    open_RC[2] = math.nan
    norm = torch.randn(dim)
    count = check_rows(
        lambda index, positions: compress(
            open_RC, index, dim=dim, norm=norm, eps=EPS, positions_U=positions, rope_=ROPE
        ),
        windows(stride, span, 150),
        torch.arange(150) * stride,
    )
    assert count > 0


def test_order_of_a_window(same_bits) -> None:
    """The written order: the quotient first, then the sum over the window's contiguous values, channel by channel."""
    open_RC, norm = torch.randn(32, 24), torch.randn(12)
    args = {"dim": 12, "norm": norm, "eps": EPS, "rope_": ROPE}
    got = compress(open_RC, torch.arange(32)[None], positions_U=torch.tensor([96]), **args)
    entry = torch.empty(12)
    for d in range(12):
        values, gates = open_RC[:, d].contiguous(), open_RC[:, 12 + d].contiguous()
        e = torch.exp(gates - gates.max())
        entry[d] = (e / e.sum() * values).sum()
    want = ops.rope(ops.rms_norm(entry[None], norm, EPS), torch.tensor([96]), ROPE)
    assert same_bits(got, want, "one window") == 12


def test_absent_rows_hold_nothing_and_backward(same_bits) -> None:
    """The first overlapping window has four rows before the sequence: whatever row 0 holds, NaN included."""
    clean = torch.randn(12, 4 * 12)
    dirty = clean.clone()
    dirty[0] = math.nan
    index_UP = torch.tensor([[-1, -1, -1, -1, 4, 5, 6, 7]])
    args = {"dim": 12, "norm": torch.ones(12), "eps": EPS, "rope_": ROPE}
    args["positions_U"] = torch.tensor([0])
    want = compress(clean, index_UP, **args)
    dirty.requires_grad_()
    got = compress(dirty, index_UP, **args)
    assert same_bits(got, want, "absent rows") == 12
    got.sum().backward()
    assert bool(dirty.grad.isfinite().all())
    assert bool((dirty.grad[:4] == 0).all())
    assert bool((dirty.grad[4:8] != 0).any())


def test_no_window() -> None:
    """A sequence shorter than a window has no entry."""
    none = torch.zeros(0, dtype=torch.int64)
    for span, width in ((8, 48), (4, 24)):
        got = compress(
            torch.randn(3, width),
            none.view(0, span),
            dim=12,
            norm=torch.ones(12),
            eps=EPS,
            positions_U=none,
            rope_=ROPE,
        )
        assert got.shape == (0, 12)


def test_large_gates_and_backward() -> None:
    """Gates of +-200: one token takes all, and nothing is NaN."""
    open_RC = torch.randn(8, 24)
    open_RC[:, 12:] = 0
    open_RC[2, 12:] = 200.0
    open_RC[3, 12:] = -200.0
    open_RC.requires_grad_()
    args = {"dim": 12, "eps": EPS, "rope_": ROPE, "positions_U": torch.tensor([0])}
    got = compress(open_RC, torch.arange(8)[None], norm=torch.ones(12), **args)
    alone = compress(open_RC, torch.tensor([[2]]), norm=torch.ones(12), **args)
    assert torch.equal(got, alone)
    got.square().sum().backward()
    assert bool(open_RC.grad.isfinite().all())
