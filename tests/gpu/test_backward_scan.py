"""The scan's gradients by kernels, on a device: tiny shapes against float64, the 30B's against torch's autograd."""

import pytest
import torch
from torch import Tensor

from tests.ops import triton_scan_backward_child
from tests.ops.conftest import compare_bits, nothing_waits
from unified_models.context import BFLOAT16_RECORD, State, paged
from unified_models.context.lists import scan_grid
from unified_models.context.memory import PackMemory
from unified_models.context.step import Step
from unified_models.formats.records import FLOAT32_RECORD
from unified_models.ops import softplus
from unified_models.ops.scan import scan

H, P, G, N, Q = 64, 64, 8, 128, 128
NAMES = ("x", "dt", "b", "c", "a", "skip")


def test_gradients_are_those_of_float64_and_backward_D10() -> None:
    assert triton_scan_backward_child.main() == 69356


def inputs(T: int, dtype: torch.dtype) -> list[Tensor]:
    """As a Mamba layer has them; x, b and c side by side."""
    wide = torch.randn(T, H * P + 2 * G * N).to(dtype)
    x, b, c = wide.split((H * P, G * N, G * N), 1)
    c = c / N**0.5
    dt, a = softplus(1.5 * torch.randn(T, H) - 2), -torch.exp(0.7 * torch.randn(H))
    of_groups = (part.unflatten(1, (G, N)) for part in (b, c))
    return [x.unflatten(1, (H, P)), dt, *of_groups, a, torch.randn(H)]


def gradients(lengths: tuple[int, ...], values: list[Tensor], dy: Tensor, kernel: bool):
    record = BFLOAT16_RECORD if dy.dtype == torch.bfloat16 else FLOAT32_RECORD
    slot = State((H, P, N), groups=G, chunk=Q, record=record)
    slot.path = "state"
    step, memory = Step.of(lengths, device=dy.device), PackMemory()
    leaves = [v.detach().requires_grad_() for v in values]
    x, dt, b, c, a, skip = leaves
    if kernel:
        y = paged.scan(step, memory, x, dt, b, c, slot, a, skip)
    else:
        grid = scan_grid(step, slot, step.starts_S[:-1])
        y, _ = scan(x.float(), dt, b.float(), c, a, skip, memory.states(step, slot), grid)
    return torch.autograd.grad(y, leaves, dy)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("lengths", [(1, 300, 0, 512), (1537,), (16384,)], ids=str)
def test_gradients_at_full_width_and_backward(lengths, dtype: torch.dtype) -> None:
    """Against autograd of the torch expressions. bfloat16: operands of products are rounded on the way back, 2^-9 of
    each, and weights at a rounding boundary by 2^-8: on average 1 in 150 of the mean, at most 1 in 30 of the largest.
    float32: sums of some 10^4 terms in another order."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        values = inputs(sum(lengths), dtype)
        dy = torch.randn(sum(lengths), H, P).to(dtype)
        got = gradients(lengths, values, dy, kernel=True)
        want = gradients(lengths, values, dy, kernel=False)
    most, mean = (1 / 30, 1 / 150) if dtype == torch.bfloat16 else (1e-4, 1e-4)
    count = 0
    for name, one, other in zip(NAMES, got, want, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape, name
        error, size = (one.double() - other.double()).abs(), other.double().abs()
        told = f"{name}: {float(error.max() / size.max()):.3g}, {float(error.mean() / size.mean()):.3g}"
        print(told)
        assert float(error.max()) <= most * float(size.max()), told
        assert float(error.mean()) <= mean * float(size.mean()), told
        count += one.numel()
    assert count > 0
    print(f"{count} values compared")


def test_every_run_has_the_same_bits_and_waits_for_nothing_and_backward() -> None:
    lengths, count = (1, 1000, 2047, 128), 0
    with torch.device("cuda"):
        values = inputs(sum(lengths), torch.bfloat16)
        dy = torch.randn(sum(lengths), H, P).bfloat16()
    slot = State((H, P, N), groups=G, chunk=Q, record=BFLOAT16_RECORD)
    slot.path = "state"
    step, memory = Step.of(lengths, device="cuda"), PackMemory()
    leaves = [v.detach().requires_grad_() for v in values]
    x, dt, b, c, a, skip = leaves
    y = paged.scan(step, memory, x, dt, b, c, slot, a, skip)
    first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
    for _ in range(5):
        with nothing_waits():
            again = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        count += compare_bits(again, first, "again")
    other = torch.autograd.grad(y, leaves, -dy)
    with pytest.raises(AssertionError, match="differ"):
        compare_bits(other, first, "control")
    print(f"{count} values compared")
    assert count > 0
