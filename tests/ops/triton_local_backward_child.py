"""Gradients of norms, activations, convolution and combine in Triton's interpreter: `TRITON_INTERPRET=1 python -m
tests.ops.triton_local_backward_child`.

Against float64 autograd of the references, on poisoned memory, of rows that lie among NaN.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tests.conftest import poisoning
from tests.ops.conftest import compare_bits
from tests.ops.triton_grouped_backward_child import among_nan
from unified_models.autograd import apply
from unified_models.ops.activation import _Relu2, _Swiglu
from unified_models.ops.activation import reference as activations
from unified_models.ops.activation.backward_triton import derivative
from unified_models.ops.combine import _CombineSorted, _Spread
from unified_models.ops.combine.backward_triton import combine_backward
from unified_models.ops.combine.reference import combine
from unified_models.ops.conv.backward_triton import conv_backward
from unified_models.ops.conv.pack import _ConvPack
from unified_models.ops.conv.reference import conv
from unified_models.ops.gated_norm import _GatedNorm
from unified_models.ops.gated_norm.backward_triton import gated_norm_backward
from unified_models.ops.gated_norm.reference import gated_norm
from unified_models.ops.pages import Sequences
from unified_models.ops.rms_norm import _RMSNorm
from unified_models.ops.rms_norm import backward_triton as norms
from unified_models.ops.rms_norm.reference import rms_norm

BF, F32 = torch.bfloat16, torch.float32


def randn(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape).to(dtype)


def compare(
    got: Sequence[Tensor | None],
    op: Callable[..., Tensor],
    leaves: Sequence[Tensor],
    dy: Tensor,
    loose: bool = False,
) -> int:
    """Gradients for each leaf against `op(*leaves)` in float64. loose: something of bfloat16 is rounded on the way."""
    doubles = [x.double().requires_grad_() for x in leaves]
    wants = torch.autograd.grad(op(*doubles), doubles, dy.double())
    for one, want in zip(got, wants, strict=True):
        assert one is not None
        assert bool((want != 0).any())
        tight = 2e-5 if one.dtype == F32 and not loose else 2**-7
        scale = float(want.abs().max())
        torch.testing.assert_close(one.double(), want, rtol=tight, atol=tight * scale)
    return len(wants)


def check_norms() -> int:
    count = 0
    for dtype in (F32, BF):
        for R, N in ((1, 48), (7, 100), (21, 1040)):
            x, dy = among_nan(randn(dtype, R, N)), among_nan(randn(dtype, R, N), 32)
            w = torch.randn(N)
            got = norms.rms_norm_backward(dy, x, w, 1e-5)
            assert (got[0].dtype, got[1].dtype) == (dtype, F32)
            count += compare(got, lambda x, w: rms_norm(x, w, 1e-5), (x, w), dy)
            got = norms.rms_norm_backward(dy, x, None, 1e-5)
            assert got[1] is None
            count += compare(got[:1], lambda x: rms_norm(x, None, 1e-5), (x,), dy)
            gate = among_nan(randn(dtype, R, N))
            got = gated_norm_backward(dy, x, gate, w, 1e-5, 2)
            count += compare(
                got, lambda *args: gated_norm(*args, 1e-5, 2), (x, gate, w), dy, dtype == BF
            )
    assert norms.share(16384, 1) == (16, 1024) and norms.share(7, 2) == (1, 4)
    assert norms.share(5000, 2) == (3, 834)
    return count + 3


def check_activations() -> int:
    count = 0
    for dtype in (F32, BF):
        for R, N in ((1, 1), (5, 100), (3, 1030)):
            x, up, dy = (among_nan(randn(dtype, R, N) * 3) for _ in range(3))
            got = derivative("relu2", dy, x.abs() if N == 1 else x)
            count += compare(got[:1], activations.relu2, (x.abs() if N == 1 else x,), dy)
            silu = torch.nn.functional.silu
            got = derivative("silu", dy, x)
            count += compare(got[:1], silu, (x,), dy)
            for limit in (2.0, None):
                got = derivative(
                    "swiglu", dy, x / 4 if N == 1 else x, up / 9 if N == 1 else up, limit
                )
                leaves = (x / 4, up / 9) if N == 1 else (x, up)
                count += compare(got, lambda g, u, n=limit: activations.swiglu(g, u, n), leaves, dy)
    edge = torch.tensor([[2.0, -2.0, 3.0, -3.0]])
    dgate, dup = derivative("swiglu", torch.ones(1, 4), edge, edge, 2.0)
    assert (dgate != 0).tolist() == [[True, True, False, True]]  # below, a gate is not cut
    assert (dup != 0).tolist() == [[True, True, False, False]]
    far = torch.tensor([[-200.0, 200.0]])
    assert derivative("silu", torch.ones(1, 2), far)[0].tolist() == [[0, 1]]
    return count + 3


def whole(x_TC: Tensor, taps_CK: Tensor, bias_C: Tensor, lengths: Sequence[int]) -> Tensor:
    return torch.cat([conv(x, taps_CK, bias_C) for x in x_TC.split(lengths)])


def check_convolutions() -> int:
    """Of sequences one after the other, with tokens of padding behind them, whose memory is NaN."""
    count = 0
    for dtype, lengths, C, K in (
        (BF, (1, 3, 40, 2), 150, 4), (F32, (150, 131), 40, 3), (F32, (5,), 16, 1),
    ):  # fmt: skip
        T, padded = sum(lengths), 5
        x, dy = (torch.full((T + padded, C), math.nan).to(kind) for kind in (dtype, F32))
        x[:T], dy[:T] = randn(dtype, T, C), torch.randn(T, C)
        taps, bias = torch.randn(C, K), torch.randn(C)
        sequence = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
        sequence = torch.cat((sequence, sequence.new_full((padded,), -1))).int()
        dx, dtaps, dbias = conv_backward(among_nan(dy), among_nan(x), taps, sequence)
        assert dx.dtype == dtype and bool((dx[T:] == 0).all())
        count += compare(
            (dx[:T], dtaps, dbias), lambda *args, n=lengths: whole(*args, n), (x[:T], taps, bias),
            dy[:T],
        )  # fmt: skip
    return count


def check_combines() -> int:
    count = 0
    for T, K, M in ((1, 1, 5), (7, 6, 100), (3, 2, 1100)):
        for dtype in (BF, F32):
            y, gates = among_nan(randn(dtype, T * K + 2, M)), torch.rand(T, K)
            place = torch.randperm(T * K).view(T, K)
            dout = among_nan(randn(dtype, T, M))
            got = combine_backward(dout, y, place, gates)
            count += compare(got, lambda y, g, at=place: combine(y[at], g), (y, gates), dout)
            whole_y = combine_backward(dout, y[: T * K], place, gates)
            compare_bits(whole_y, (got[0][: T * K], got[1]), "all rows are named")
            assert bool((got[0][T * K :] == 0).all())
    return count


def check_functions() -> int:
    """What sends gradients through the kernels, forward and backward."""
    count = 0
    x, gate, w = (torch.randn(9, 64).requires_grad_() for _ in range(3))
    w = w.detach()[0].requires_grad_()
    dy = torch.randn(9, 64)
    place = torch.randperm(18).view(9, 2)
    order, y = place.flatten().argsort(), torch.randn(18, 64).requires_grad_()
    gates, taps = torch.rand(9, 2).requires_grad_(), torch.randn(64, 4).requires_grad_()
    total = torch.tensor([2, 7]).int()
    of = torch.arange(2).repeat_interleave(total).int()
    starts = torch.tensor([0, 2, 9]).int()
    position = torch.arange(9).int() - starts[of.long()]
    who = Sequences(of, position, starts, torch.zeros_like(total), total)
    both = torch.randn(18, 64)
    cases = (
        (apply(_RMSNorm, x, w, 1e-5, F32), lambda x, w: rms_norm(x, w, 1e-5), (x, w), dy),
        (apply(_RMSNorm, x, None, 1e-5, F32), lambda x: rms_norm(x, None, 1e-5), (x,), dy),
        (
            apply(_GatedNorm, x, gate, w, 1e-5, 2), lambda *a: gated_norm(*a, 1e-5, 2),
            (x, gate, w), dy,
        ),
        (apply(_Relu2, x), activations.relu2, (x,), dy),
        (apply(_Swiglu, x, gate, 1.0), lambda g, u: activations.swiglu(g, u, 1.0), (x, gate), dy),
        (
            apply(_CombineSorted, y, place, gates, F32), lambda y, g: combine(y[place], g),
            (y, gates), dy,
        ),
        (apply(_Spread, x, order, place), lambda x: x[order // 2], (x,), both),
        (
            apply(_ConvPack, x, taps, w, starts[:-1], who), lambda *a: whole(*a, (2, 7)),
            (x, taps, w), dy,
        ),
    )  # fmt: skip
    compare_bits(apply(_Spread, x, order, place), x[order // 2], "rows of each expert")
    for out, op, leaves, given in cases:
        plain = tuple(leaf.detach() for leaf in leaves)
        torch.testing.assert_close(out.detach(), op(*plain), rtol=1e-5, atol=1e-5)
        count += compare(torch.autograd.grad(out, leaves, given), op, plain, given)
    return count


def main() -> None:
    torch.manual_seed(0)
    torch.empty = poisoning(torch.empty)
    count = check_norms() + check_activations() + check_convolutions() + check_combines()
    count += check_functions()
    print(f"{count} calls agree")


if __name__ == "__main__":
    main()
