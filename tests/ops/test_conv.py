"""conv: the direct sum over a token's last rows, in its written order, whatever else memory holds."""

import math

import pytest
import torch
from torch import Tensor

from unified_models.context import Rows
from unified_models.context.lists import tap_rows
from unified_models.context.step import Step
from unified_models.ops.conv import conv
from unified_models.ops.conv.reference import conv as reference

SHAPES = [(20, 12, 4), (9, 7, 2), (33, 64, 4), (5, 3, 1)]  # tokens, channels, taps


def taps_of(step: Step, K: int, base: list[int]) -> Tensor:
    return tap_rows(step, Rows(1, keep=K), torch.tensor(base))


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("T", "C", "K"), SHAPES)
def test_conv_and_backward(check_gradients, T: int, C: int, K: int, dtype, bias: bool) -> None:
    leaves = {
        "rows": torch.randn(T, C).to(dtype).requires_grad_(),
        "taps": torch.randn(C, K).requires_grad_(),
    }
    if bias:
        leaves["bias"] = torch.randn(C).requires_grad_()
    index_TK = taps_of(Step.of([T]), K, [0])
    check_gradients(
        lambda: conv(leaves["rows"], index_TK, leaves["taps"], leaves.get("bias")),
        lambda rows, taps, bias=None: reference(rows, taps, bias),
        leaves,
        terms=T + K,
    )


def test_reference_gradient_by_finite_differences() -> None:
    shapes = ((6, 3), (3, 4), (3,))
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(reference, inputs)


def test_twenty_tokens_of_twelve_channels_D13(same_bits) -> None:
    """Length 20, width 4: the direct sum, value by value, bias first, oldest tap first; nothing is shifted."""
    x_TC, taps_CK, bias_C = torch.randn(20, 12).bfloat16(), torch.randn(12, 4), torch.randn(12)
    got = conv(x_TC, taps_of(Step.of([20]), 4, [0]), taps_CK, bias_C)
    rows = []
    for t in range(20):
        total = bias_C
        for k in range(4):
            seen = x_TC[t - 3 + k].float() if t - 3 + k >= 0 else torch.zeros(12)
            total = total + taps_CK[:, k] * seen
        rows.append(total)
    assert got.dtype == torch.float32
    assert same_bits(got, torch.stack(rows), "direct sum") == 240
    backwards = torch.stack(rows).flip(0)
    with pytest.raises(AssertionError, match="differ"):
        same_bits(got, backwards, "control")


def test_torch_adds_in_another_order(same_bits) -> None:
    """The control of the written order: torch's own convolution is close, and has other bits."""
    x_TC, taps_CK, bias_C = torch.randn(300, 64), torch.randn(64, 4), torch.randn(64)
    got = conv(x_TC, taps_of(Step.of([300]), 4, [0]), taps_CK, bias_C)
    other = reference(x_TC, taps_CK, bias_C)
    assert torch.allclose(got, other, atol=1e-5)
    with pytest.raises(AssertionError, match="differ"):
        same_bits(got, other.contiguous(), "torch")


@pytest.mark.parametrize(("C", "K"), [(7, 4), (64, 4), (6144, 4)], ids=str)
def test_rows_keep_their_bits(check_rows, C: int, K: int) -> None:
    """Tokens in packs of every size; memory holds NaN where no tap reads. 6144 channels: the 30B's."""
    rows_RC = torch.randn(400, C)
    rows_RC[[0, 150, 399]] = math.nan
    index_TK = torch.randint(1, 150, (150, K))
    index_TK[torch.rand(150, K) < 0.2] = -1
    taps_CK, bias_C = torch.randn(C, K), torch.randn(C)
    assert check_rows(lambda index: conv(rows_RC, index, taps_CK, bias_C), index_TK) > 0


def test_sequences_do_not_meet_F01_F02(same_bits) -> None:
    """Documents of 1, 0, 129 and 3 in one pack, and a sequence that goes on: each as alone, in any split."""
    taps_CK, bias_C, count = torch.randn(12, 4), torch.randn(12), 0
    docs = [torch.randn(n, 12).bfloat16() for n in (1, 0, 129, 3)]
    step = Step.of([len(d) for d in docs])
    packed = conv(torch.cat(docs), taps_of(step, 4, step.starts_S[:-1].tolist()), taps_CK, bias_C)
    for s, doc in enumerate(docs):
        alone = conv(doc, taps_of(Step.of([len(doc)]), 4, [0]), taps_CK, bias_C)
        own = packed[step.starts_S[s] : step.starts_S[s + 1]]
        count += same_bits(alone, own, f"document {s}", empty=not len(doc))
    whole = conv(docs[2], taps_of(Step.of([129]), 4, [0]), taps_CK, bias_C)
    for past in (1, 2, 3, 64, 128):
        first = max(0, past - 3)
        kept = torch.cat((docs[2][first:], torch.full((2, 12), math.nan).bfloat16()))
        index = taps_of(Step.of([129 - past], [past]), 4, [-first])
        count += same_bits(conv(kept, index, taps_CK, bias_C), whole[past:], f"after {past}")
    assert count > 0


def test_absent_rows_hold_nothing_and_backward() -> None:
    """NaN in memory that no tap reads: no value and no gradient notices, taps before the start get none."""
    rows_RC = torch.full((6, 5), math.nan)
    rows_RC[2:4] = torch.randn(2, 5)
    rows_RC.requires_grad_()
    taps_CK = torch.randn(5, 4).requires_grad_()
    out = conv(rows_RC, taps_of(Step.of([2]), 4, [2]), taps_CK, None)
    out.sum().backward()
    assert bool(out.isfinite().all() and taps_CK.grad.isfinite().all())
    assert bool((rows_RC.grad[[0, 1, 4, 5]] == 0).all() and (rows_RC.grad[2:4] != 0).all())
    assert bool((taps_CK.grad[:, :2] == 0).all() and (taps_CK.grad[:, 2:] != 0).all())


def test_no_tokens() -> None:
    index_TK = torch.zeros(0, 4, dtype=torch.int64)
    assert conv(torch.zeros(3, 8), index_TK, torch.ones(8, 4), torch.ones(8)).shape == (0, 8)
    assert conv(torch.zeros(0, 8), index_TK, torch.ones(8, 4), None).shape == (0, 8)
