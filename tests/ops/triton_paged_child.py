"""In Triton's interpreter, in a process of its own: the scan and the convolution over pages, step by step, against the
operators of the CPU and against themselves. Prints how many values were compared. tests/gpu runs it on a device."""

import os

import torch
from torch import Tensor

from tests.ops.conftest import compare_bits
from tests.ops.steps import pieces
from unified_models.context import BFLOAT16_RECORD, FLOAT32_RECORD, Rows, State, paged
from unified_models.context.lists import scan_grid, tap_rows
from unified_models.context.memory import PackMemory
from unified_models.context.step import DeviceStep, Step
from unified_models.formats.records import PlainRecord
from unified_models.ops.conv import conv
from unified_models.ops.pages import Pages, write
from unified_models.ops.scan import scan

H, P, G, N, Q, C, K = 4, 16, 2, 16, 32, 40, 4
LENGTHS = (1, 5, 33, 70, 0)
STEPS = ((1, 3, 30, 20, 0), (0, 1, 1, 44, 0), (0, 1, 2, 6, 0))
"""New tokens of each sequence in each step; the last sequence is padding."""


class Paged:
    """Pages of one chunk in any order, of what nobody may read, and the last K rows of a convolution in each."""

    def __init__(self, dtype: torch.dtype) -> None:
        pages = 32
        order = torch.randperm(pages).int()
        self.table = order[: 5 * 5].view(5, 5)
        self.kept = {
            "x": torch.full((pages, Q, H * P), torch.nan, dtype=dtype),
            "dt": torch.full((pages, Q, H), torch.nan),
            "b": torch.full((pages, Q, G * N), torch.nan, dtype=dtype),
            "states": torch.full((pages, H * P * N), torch.nan),
            "seen": torch.full((pages, H * P * N), torch.nan, dtype=dtype),
            "rows": torch.full((pages, K, C), torch.nan, dtype=dtype),
        }

    def pages(self, slot: Rows | State) -> tuple[Pages, ...]:
        if isinstance(slot, Rows):
            return (Pages(self.kept["rows"], self.table, Q, K * C, C, ring=K),)
        rows = [Pages(self.kept[k], self.table, Q, Q * n, n) for k, n in
                (("x", H * P), ("dt", H), ("b", G * N))]  # fmt: skip
        states = (self.kept["states"], self.kept["seen"])
        return (*rows, *(Pages(kept, self.table, 1, H * P * N, 0) for kept in states))

    def keep(self, step: Step, slot: Rows | State, *rows: Tensor) -> None:
        write(step.sequences, self.pages(slot)[: len(rows)], rows)

    def keep_entries(self, *_: object) -> None:
        raise AssertionError("there are none here")


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def slots(record: PlainRecord) -> tuple[State, Rows]:
    state, rows = State((H, P, N), groups=G, chunk=Q, record=record), Rows(C, keep=K, record=record)
    state.path, rows.path = "state", "rows"
    return state, rows


def main() -> int:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        count = sum(compare(record) for record in (BFLOAT16_RECORD, FLOAT32_RECORD))
    print(f"{count} values agree")
    return count


def compare(record: PlainRecord) -> int:
    """The whole sequences on the CPU, in one step by kernels, and in three steps in pages."""
    T, dtype = sum(LENGTHS), record.dtype
    # Wider than they are read: what a projection made lies side by side.
    wide = randn(T, H * P + G * N + G * N + 8, dtype=dtype)
    x, b, c, _ = wide.split((H * P, G * N, G * N, 8), 1)
    x, b, c = x.unflatten(1, (H, P)), b.unflatten(1, (G, N)), c.unflatten(1, (G, N))
    dt, a, skip = torch.rand(T, H) * 0.3, -torch.rand(H) * 3, randn(H)
    rows, taps, bias = randn(T, C + 8, dtype=dtype)[:, :C], randn(C, K), randn(C)
    state, recent = slots(record)

    step, pack = Step.of(LENGTHS, device=torch.get_default_device()), PackMemory()
    zeros = pack.states(step, state)
    want, _ = scan(
        x.float(), dt, b.float(), c, a, skip, zeros, scan_grid(step, state, step.starts_S[:-1])
    )
    want_conv = conv(rows, tap_rows(step, recent, step.starts_S[:-1]), taps, bias)
    whole = paged.scan(step, pack, x, dt, b, c, state, a, skip)
    whole_conv = paged.conv(step, pack, rows, taps, bias, recent)
    tolerance = 2e-5 if dtype == torch.float32 else 0.1  # weights round to bfloat16 either way
    torch.testing.assert_close(whole, want, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(whole_conv, want_conv, rtol=1e-6, atol=1e-6)

    memory, padded = Paged(dtype), 7
    assert tuple(map(sum, zip(*STEPS, strict=True))) == LENGTHS
    got, got_conv = torch.full_like(whole, torch.nan), torch.full_like(whole_conv, torch.nan)
    for step, order, at, index in pieces(STEPS, padded, 4 * Q):
        all_rows, memory.table = memory.table, memory.table[order].contiguous()
        part = paged.scan(step, memory, x[index], dt[index], b[index], c[index], state, a, skip)
        part_conv = paged.conv(step, memory, rows[index], taps, bias, recent)
        got[at], got_conv[at] = part[: len(at)], part_conv[: len(at)]
        memory.table = all_rows
    compared = compare_bits((got, got_conv), (whole, whole_conv), "in pages")
    kept = {name: rows.clone() for name, rows in memory.kept.items()}
    idle = torch.zeros(len(LENGTHS) + 1, dtype=torch.int32)
    step, some = DeviceStep(idle, idle[1:], padded, 4 * Q), slice(padded)
    part = paged.scan(step, memory, x[some], dt[some], b[some], c[some], state, a, skip)
    part_conv = paged.conv(step, memory, rows[some], taps, bias, recent)
    assert part.eq(0).all() and part_conv.isfinite().all(), "a batch of nothing but padding"
    for name, before in kept.items():
        assert torch.equal(before.view(torch.uint8), memory.kept[name].view(torch.uint8)), name
    count = gradients(record) if dtype == torch.float32 else 0
    return compared + count


def gradients(record: PlainRecord) -> int:
    """A kernel's gradients are those of the CPU's operator: to some ulps of the largest, which sums cancel."""
    state, recent = slots(record)
    step, grads = Step.of((3, 40), device=torch.get_default_device()), []
    leaves = [
        torch.randn(43, H, P),
        torch.rand(43, H),
        torch.randn(43, G, N),
        torch.randn(43, G, N),
    ]
    leaves += [
        -torch.rand(H),
        torch.randn(H),
        torch.randn(43, C),
        torch.randn(C, K),
        torch.randn(C),
    ]
    for kernel in (True, False):
        x, dt, b, c, a, skip, rows, taps, bias = (leaf.clone().requires_grad_() for leaf in leaves)
        pack, base = PackMemory(), step.starts_S[:-1]
        if kernel:
            y = paged.scan(step, pack, x, dt, b, c, state, a, skip)
            z = paged.conv(step, pack, rows, taps, bias, recent)
        else:
            grid = scan_grid(step, state, base)
            y, _ = scan(x, dt, b, c, a, skip, pack.states(step, state), grid)
            z = conv(rows, tap_rows(step, recent, base), taps, bias)
        (y.square().sum() + z.square().sum()).backward()
        grads.append([t.grad for t in (x, dt, b, c, a, skip, rows, taps, bias)])
    for mine, other in zip(*grads, strict=True):
        least = max(1e-4, 1e-6 * float(other.abs().max()))
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=least)
    return sum(grad.numel() for grad in grads[0])


if __name__ == "__main__":
    main()
