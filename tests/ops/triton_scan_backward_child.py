"""In Triton's interpreter, in a process of its own: the scan's gradients by kernels against float64 autograd of the
recurrence and of the chunked form, and against themselves by bits. Prints how many values were compared. tests/gpu runs
it on a device."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from tests.ops.conftest import compare_bits
from tests.ops.test_scan import BF16, F32, ROW_NAMES, Case, truth
from unified_models.context.paged import state_rows
from unified_models.context.step import Step
from unified_models.ops.scan.backward_triton import scan_backward
from unified_models.ops.scan.flat import Flat, scan_flat
from unified_models.ops.scan.places import Inputs, Launch
from unified_models.ops.scan.reference import scan as recurrence
from unified_models.ops.scan.triton import tiles

NAMES = ("x", "dt", "b", "c", "a", "skip", "state")
SHAPES = [  # (H, P, G, N), Q, (rows, of which past, chunks before them) of each sequence
    ((4, 16, 2, 32), 32, ((1, 0, 0), (0, 0, 0), (67, 0, 0))),
    ((3, 7, 1, 20), 16, ((17, 0, 0), (16, 9, 2))),
    ((2, 16, 2, 16), 24, ((30, 3, 1), (24, 23, 1), (2, 1, 0))),
]
GAP = 3
"""Rows of NaN before, between and after the sequences, wherever some sequence has a past."""


def sequences(sizes: tuple[int, ...], rows: Sequence[tuple[int, int, int]], dtype: torch.dtype):
    """Cases, and the step that brings their new rows. Where no chunk is before, the state is zero."""
    first = Case.random(1, sizes, dtype)
    cases = [Case.random(n, sizes, dtype).like(first) for n, _, _ in rows]
    cases = [
        case if chunks else replace(case, state=torch.zeros_like(case.state))
        for case, (_, _, chunks) in zip(cases, rows, strict=True)
    ]
    return cases


def packed(cases: list[Case], rows: Sequence[tuple[int, int, int]], Q: int):
    """The arguments of `scan_flat`: leaves by name, and where rows are. x and b are parts of wider rows."""
    gap = GAP if any(p or n for _, p, n in rows) else 0
    step = Step.of([n - p for n, p, _ in rows], [p + n * Q for _, p, n in rows], cases[0].x.device)
    dtype, leaves, base, at = cases[0].c.dtype, {}, [], gap
    for case, (_, _, chunks) in zip(cases, rows, strict=True):
        base.append(at - chunks * Q)
        at += len(case.x) + gap
    for name in ("x", "dt", "b"):
        parts = [torch.full((gap, *getattr(cases[0], name).shape[1:]), torch.nan)]
        for case in cases:
            parts += [getattr(case, name), parts[0]]
        kind = F32 if gap or name == "dt" else dtype
        leaves[name] = torch.cat(parts).to(kind)
    leaves["c"] = torch.cat([case.c[p:] for case, (_, p, _) in zip(cases, rows, strict=True)])
    leaves |= {"a": cases[0].a, "skip": cases[0].skip}
    leaves["state"] = torch.stack([case.state for case in cases])
    who, T = step.sequences, step.num_tokens
    slot = cases[0].slot(Q)
    flat = Flat(
        torch.tensor(base), *state_rows(step, slot), who, tiles(who, T, Q), slot.shape,
        slot.groups, Q,
    )  # fmt: skip
    return leaves, flat


@contextmanager
def poisoned() -> Iterator[None]:
    """What is allocated and not written is NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def by_kernels(leaves: dict[str, Tensor], flat: Flat, dy: Tensor, given: Tensor | None):
    """y, the states, and the gradients by name."""
    inputs = [leaves[name].detach().clone().requires_grad_() for name in NAMES]
    with poisoned():
        y, states = scan_flat(*inputs, flat)
        outs, grads = ([y, states], [dy, given]) if given is not None else ([y], [dy])
        found = torch.autograd.grad(outs, inputs, grads)
    return y.detach(), states.detach(), dict(zip(NAMES, found, strict=True))


def oracle(cases: list[Case], rows, Q: int, dy: Tensor, given: Tensor | None, dtype):
    """Gradients in float64 by autograd: of the recurrence if nothing is past, given or rounded, else of the chunked
    form. Those of rows sequence by sequence."""
    doubles = [
        {name: getattr(case, name).double().requires_grad_() for name in (*ROW_NAMES, "state")}
        for case in cases
    ]
    a, skip = (getattr(cases[0], name).double().requires_grad_() for name in ("a", "skip"))
    plain = dtype == F32 and given is None and not any(p or n for _, p, n in rows)
    ys, ends = [], []
    for each, (_, past, _) in zip(doubles, rows, strict=True):
        if plain:
            ys.append(recurrence(*(each[name] for name in ROW_NAMES), a, skip) + 0 * a[:, None])
        else:
            y, full = truth(Case(a=a, skip=skip, **each), Q, past, dtype)
            ys.append(y)
            ends += full
    total = (torch.cat(ys) * dy.double()).sum()
    if given is not None and ends:
        total = total + (torch.stack(ends) * given.double()).sum()
    leaves = [a, skip, *(each[n] for each in doubles for n in (*ROW_NAMES, "state"))]
    grads = torch.autograd.grad(total, leaves, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True)]
    names = (*ROW_NAMES, "state")
    of_cases = [grads[2 + i * 5 : 7 + i * 5] for i in range(len(cases))]
    found = {"a": grads[0], "skip": grads[1]}
    for i, name in enumerate(names):
        parts = [of[i] for of in of_cases]
        if name == "c":
            parts = [part[p:] for part, (_, p, _) in zip(parts, rows, strict=True)]
        found[name] = torch.stack(parts) if name == "state" else torch.cat(parts)
    return found


def close(got: dict[str, Tensor], want: dict[str, Tensor], names, dtype: torch.dtype) -> int:
    """float32: some hundred ulps of the largest. bfloat16: operands of products are rounded (2^-9 of each), and a
    weight that lies on a rounding boundary is off by 2^-8 of itself: on average 1 in 150, at most 1 in 30."""
    count = 0
    for name in names:
        one, other = got[name].double(), want[name]
        assert one.shape == other.shape, name
        error, size = (one - other).abs(), other.abs()
        most = float(error.max() / size.max())
        mean = float(error.mean() / size.mean())
        bound = (2e-5, 2e-5) if dtype == F32 else (1 / 30, 1 / 150)
        assert most < bound[0] and mean < bound[1], f"{name} {dtype}: {most:.3g}, {mean:.3g}"
        count += one.numel()
        if os.environ.get("SAY"):
            print(f"{name} {dtype}: most {most:.3g} of the largest, mean {mean:.3g}")
    return count


def compare(sizes, Q: int, rows, dtype: torch.dtype) -> int:
    cases = sequences(sizes, rows, dtype)
    leaves, flat = packed(cases, rows, Q)
    T, H, P = len(leaves["c"]), *sizes[:2]
    dy = torch.randn(T, H, P).to(dtype)
    past = any(p or n for _, p, n in rows)
    given = torch.randn(flat.num_new, H, P, sizes[3]) if past else None
    _, _, got = by_kernels(leaves, flat, dy, given)
    want = oracle(cases, rows, Q, dy, given, dtype)
    at = zip(cases, starts(cases, past), strict=True)
    there = torch.cat([torch.arange(len(case.x)) + start for case, start in at])
    for name in ("x", "dt", "b"):
        rest = torch.ones(len(got[name]), dtype=torch.bool)
        rest[there] = False
        assert not got[name][rest].any(), f"{name}: rows of nobody"
        assert got[name].dtype == leaves[name].dtype
        got[name] = got[name][there]
    names = [n for n in NAMES if n != "state" or past]
    if past:  # a sequence from position 0 has no state to send anything to
        carried = torch.tensor([chunks > 0 for _, _, chunks in rows])
        got["state"], want["state"] = got["state"][carried], want["state"][carried]
    count = close(got, want, names, dtype)
    for name in names:
        try:
            close({name: got[name] * 1.1}, want, [name], dtype)
        except AssertionError:
            continue
        raise AssertionError(f"control: a tenth more of {name} passes, too")
    alone = dtype == BF16 and not past
    return count + by_themselves(cases, rows, Q, dy, got) if alone else count


def starts(cases: list[Case], past: bool) -> list[int]:
    """The first row of each case among those of `packed`."""
    gap, at, found = GAP if past else 0, 0, []
    for case in cases:
        found.append(at + gap)
        at += gap + len(case.x)
    return found


def by_themselves(cases: list[Case], rows, Q: int, dy: Tensor, whole: dict[str, Tensor]) -> int:
    """Gradients of each sequence's rows have the bits that they have in the pack."""
    count, at = 0, 0
    for case, row in zip(cases, rows, strict=True):
        part = slice(at, at + len(case.x))
        at = part.stop
        if len(case.x):
            leaves, flat = packed([case], [row], Q)
            alone = by_kernels(leaves, flat, dy[part], None)[2]
            for name in ROW_NAMES:
                count += compare_bits(alone[name], whole[name][part], name)
    return count


def tilings() -> int:
    """One tile of a chunk or several, one part of a state or several: within rounding the same."""
    sizes, Q, rows = SHAPES[0]
    cases = sequences(sizes, rows, F32)
    leaves, flat = packed(cases, rows, Q)
    dy = torch.randn(len(leaves["c"]), *sizes[:2])
    with torch.no_grad():
        seen = forward_states(leaves, flat)
    args = [leaves[name] for name in NAMES[:-1]]
    of = Inputs(*args, seen, flat.table_SK, flat.base_S.int(), flat.who, Q)
    one, two = (
        dict(zip(NAMES, scan_backward(of, dy, None, launch=Launch(n, n, n)), strict=True))
        for n in (16, 32)
    )
    return close(one, {k: v.double() for k, v in two.items()}, NAMES[:-1], F32)


def forward_states(leaves: dict[str, Tensor], flat: Flat) -> Tensor:
    _, states = scan_flat(*(leaves[name] for name in NAMES), flat)
    return states.flatten(1)


def main() -> int:
    device = "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda"
    torch.manual_seed(0)
    with torch.device(device):
        count = tilings()
        for sizes, Q, rows in SHAPES:
            for dtype in (F32, BF16):
                count += compare(sizes, Q, rows, dtype)
    print(f"{count} values agree")
    return count


if __name__ == "__main__":
    main()
