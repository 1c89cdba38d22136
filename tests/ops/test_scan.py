"""scan: output and every gradient against float64, and rows whose bits no cut, pack or later row moves."""

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from unified_models.context import State
from unified_models.context.lists import scan_grid
from unified_models.context.step import Step
from unified_models.ops import softplus
from unified_models.ops.scan import scan
from unified_models.ops.scan.reference import scan as recurrence

BF16, F32 = torch.bfloat16, torch.float32
TINY = (8, 16, 2, 32)  # H, P, G, N
WIDE = (64, 64, 8, 128)
ROW_NAMES = ("x", "dt", "b", "c")


@dataclass(frozen=True)
class Case:
    """One sequence from a chunk's boundary on: rows [T, ...] of each input, the heads' a and skip, the state before."""

    x: Tensor
    dt: Tensor
    b: Tensor
    c: Tensor
    a: Tensor
    skip: Tensor
    state: Tensor

    @classmethod
    def random(cls, T: int, sizes: tuple[int, ...] = TINY, dtype: torch.dtype = BF16) -> "Case":
        """x and b hold values of `dtype` in float32, as a memory gives them back."""
        H, P, G, N = sizes
        return cls(
            x=torch.randn(T, H, P).to(dtype).float(),
            dt=softplus(1.5 * torch.randn(T, H) - 2),
            b=torch.randn(T, G, N).to(dtype).float(),
            c=(torch.randn(T, G, N) / N**0.5).to(dtype),
            a=-torch.exp(0.7 * torch.randn(H)),
            skip=torch.randn(H),
            state=torch.randn(H, P, N),
        )

    def like(self, other: "Case") -> "Case":
        """With the heads of another: sequences of one step share them."""
        return replace(self, a=other.a, skip=other.skip)

    def slot(self, Q: int) -> State:
        (H, P), (G, N) = self.x.shape[1:], self.b.shape[1:]
        return State((H, P, N), groups=G, chunk=Q)


def run(cases: Sequence[Case], Q: int, past: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """One step: case s brings the rows after its first past[s] (fewer than Q, the open chunk's). Rows that nobody has
    are NaN: before, between and after the sequences."""
    past = [0] * len(cases) if past is None else past
    gap = 3
    base, rows, at = [], {name: [] for name in ROW_NAMES[:3]}, gap
    for case in cases:
        base.append(at)
        at += len(case.x) + gap
        for name, parts in rows.items():
            value = getattr(case, name)
            nothing = value.new_full((gap, *value.shape[1:]), torch.nan)
            parts += [nothing, value] if case is not cases[-1] else [nothing, value, nothing]
    step = Step.of([len(case.x) - p for case, p in zip(cases, past, strict=True)], past)
    return scan(
        *(torch.cat(parts) for parts in rows.values()),
        torch.cat([case.c[p:] for case, p in zip(cases, past, strict=True)]),
        cases[0].a,
        cases[0].skip,
        torch.stack([case.state for case in cases]),
        scan_grid(step, cases[0].slot(Q), torch.tensor(base)),
    )


def feed(case: Case, Q: int, cuts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The sequence in steps that end at `cuts`, each with its open rows and the last state, as a memory would."""
    outs, states, done = [], [], 0
    for end in (*cuts, len(case.x)):
        first = done - done % Q
        rows = {name: getattr(case, name)[first:end] for name in ROW_NAMES}
        state = states[-1] if states else case.state
        y, full = run([replace(case, state=state, **rows)], Q, [done - first])
        outs.append(y)
        states += list(full)
        done = end
    return torch.cat(outs), torch.stack(states) if states else case.state[None][:0]


def truth(
    case: Case, Q: int, past: int, dtype: torch.dtype, unrounded: str = ""
) -> tuple[Tensor, list[Tensor]]:
    """The chunked form in the precision of its input, by index notation; roundings pass their gradient, and one of them
    may be left out."""

    def q(v: Tensor, what: str) -> Tensor:
        if dtype == F32 or what == unrounded:
            return v
        return v + (v.detach().to(F32).to(dtype).to(v.dtype) - v).detach()

    each, state, outs, states = case.a.shape[0] // case.b.shape[1], case.state, [], []
    for first in range(0, len(case.x), Q):
        part = slice(first, first + Q)
        x, dt = case.x[part], case.dt[part]
        b, c = (v[part].repeat_interleave(each, 1) for v in (case.b, case.c))
        log = torch.cumsum(dt * case.a, 0)
        seen = torch.ones(len(x), len(x)).tril().bool()[:, :, None]
        apart = torch.where(seen, log[:, None] - log[None], -torch.inf)
        w = q(torch.einsum("ihn,jhn->ijh", c, b) * torch.exp(apart) * dt, "weights")
        y = torch.einsum("ijh,jhp->ihp", w, x) + case.skip[:, None] * x
        outs.append(
            y + torch.exp(log)[..., None] * torch.einsum("hpn,ihn->ihp", q(state, "state"), c)
        )
        if len(x) == Q:
            left = q(b * (torch.exp(log[-1] - log) * dt)[..., None], "decayed b")
            state = torch.exp(log[-1])[:, None, None] * state + torch.einsum(
                "jhp,jhn->hpn", x, left
            )
            states.append(state)
    return torch.cat(outs)[past:] if outs else case.x[past:], states


SHAPES = [  # sizes (H, P, G, N), Q, (rows, of which past) of each sequence
    (TINY, 16, ((17, 0), (31, 15), (1, 0))),
    ((8, 16, 8, 32), 24, ((50, 3), (24, 23))),
    ((4, 64, 1, 128), 128, ((129, 127), (30, 0))),
    ((3, 7, 1, 20), 16, ((40, 0), (16, 9))),
    ((8, 64, 8, 20), 24, ((25, 24 - 1), (3, 2))),
]
NAMES = [f"{'x'.join(map(str, sizes))}-Q{Q}" for sizes, Q, _ in SHAPES]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("sizes", "Q", "rows"), SHAPES, ids=NAMES)
def test_scan_and_backward_D10(check_gradients, sizes, Q, rows, dtype) -> None:
    """Every input, the open rows and the initial states among them. float32: sums of at most Q + N terms. bfloat16: a
    weight that float32 puts on the other side of a rounding boundary is off by 2^-8 of itself."""
    first = Case.random(rows[0][0], sizes, dtype)
    cases = [first] + [Case.random(n, sizes, dtype).like(first) for n, _ in rows[1:]]
    past = [p for _, p in rows]
    leaves = {"a": first.a.requires_grad_(), "skip": first.skip.requires_grad_()}
    for s, case in enumerate(cases):
        for name in (*ROW_NAMES, "state"):
            leaves[f"{name}{s}"] = getattr(case, name).requires_grad_()

    def reference(a: Tensor, skip: Tensor, **given: Tensor) -> tuple[Tensor, Tensor]:
        ys, states = [], []
        for s, p in enumerate(past):
            inputs = {name: given[f"{name}{s}"] for name in (*ROW_NAMES, "state")}
            y, ends = truth(Case(a=a, skip=skip, **inputs), Q, p, dtype)
            ys.append(y)
            states += ends
        return torch.cat(ys), torch.stack(states)

    check_gradients(
        lambda: run(cases, Q, past),
        reference,
        leaves,
        terms=4 * (Q + sizes[-1]) if dtype == F32 else 1 << 15,
    )


@pytest.mark.parametrize("unrounded", ["", "state", "weights", "decayed b"])
def test_where_values_are_rounded(unrounded: str) -> None:
    """bfloat16 outputs are those of the float64 form but for 1 in 100 whose float32 sum lies at a rounding boundary;
    with one of the three roundings left out there, every tenth moves, or the states do."""
    case = Case.random(100)
    y, states = run([case], 16)
    doubles = {name: getattr(case, name).double() for name in (*ROW_NAMES, "a", "skip", "state")}
    want, ends = truth(Case(**doubles), 16, 0, BF16, unrounded)
    moved = float((want.bfloat16() != y).float().mean())
    off = float((states - torch.stack(ends)).abs().mean() / states.abs().mean())
    if unrounded:
        assert moved > 0.1
        assert unrounded != "decayed b" or off > 1e-4
    else:
        assert moved < 0.01
        assert off < 1e-5


@pytest.mark.parametrize(("T", "Q"), [(40, 16), (50, 24), (5, 128)], ids=str)
def test_scan_is_the_recurrence_and_backward(check_gradients, T: int, Q: int) -> None:
    """In float32 nothing is rounded between: the chunked form is the recurrence, for any chunk."""
    case = Case.random(T, TINY, F32)
    case = replace(case, state=torch.zeros_like(case.state))
    leaves = {name: getattr(case, name).requires_grad_() for name in (*ROW_NAMES, "a", "skip")}
    check_gradients(
        lambda: run([case], Q)[0], lambda **v: recurrence(*v.values()), leaves, terms=512
    )


def test_reference_gradient_by_finite_differences() -> None:
    shapes = {"x": (5, 2, 3), "b": (5, 1, 2), "c": (5, 1, 2), "a": (2,), "skip": (2,)}
    leaf = {name: torch.randn(shape, dtype=torch.float64) for name, shape in shapes.items()}
    leaf |= {"dt": torch.rand(5, 2).double(), "state": torch.randn(2, 3, 2, dtype=torch.float64)}
    names = [*leaf]
    inputs = [t.requires_grad_() for t in leaf.values()]

    def flat(*values: Tensor) -> tuple[Tensor, ...]:
        y, states = truth(Case(**dict(zip(names, values, strict=True))), 2, 1, F32)
        return y, *states

    assert torch.autograd.gradcheck(flat, inputs)
    zero = torch.zeros_like(leaf["state"])
    whole = truth(Case(**leaf | {"state": zero}), 2, 0, F32)[0]
    order = (*ROW_NAMES, "a", "skip")
    assert torch.allclose(whole, recurrence(*(leaf[name] for name in order)))


LENGTHS = {16: (15, 16, 17, 33), 24: (23, 25, 49), 128: (127, 128, 129, 255, 256, 257)}


def compare_cuts(
    same_bits: Callable, case: Case, Q: int, schedules: Sequence[Sequence[int]]
) -> int:
    """The whole sequence in one step against each schedule; then the control, one ulp in one value of a step."""
    whole, count = run([case], Q), 0
    for cuts in schedules:
        count += same_bits(feed(case, Q, cuts), whole, f"cuts {cuts}")
    y, states = (t.clone() for t in feed(case, Q, schedules[-1]))
    y.view(torch.int16 if y.dtype == BF16 else torch.int32).view(-1)[-1] ^= 1
    with pytest.raises(AssertionError, match="1 of"):
        same_bits((y, states), whole, "control")
    return count


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(
    ("Q", "sizes"),
    [(16, TINY), (24, (8, 7, 8, 20)), (128, (2, 64, 1, 128)), (16, (8, 16, 1, 32))],
    ids=str,
)
def test_cuts_change_no_bit_A09(same_bits, threads, Q: int, sizes, dtype) -> None:
    """One step against row by row and random steps, at lengths around the chunks' ends. (Long ones: the last rows.)"""
    count = 0
    for T in LENGTHS[Q]:
        case = Case.random(T, sizes, dtype)
        random_cuts = [sorted(random.sample(range(1, T), min(n, T - 1))) for n in (1, 3, 9)]
        rows = range(1 if T <= 50 or T == Q + 1 else T - 6, T)
        count += compare_cuts(same_bits, case, Q, [rows, *random_cuts])
    assert count > 0


def test_cuts_change_no_bit_at_full_width(same_bits) -> None:
    """The widths of the 30B: 64 heads of 64, 8 groups, state 128, chunks of 128."""
    case = Case.random(150, WIDE)
    assert compare_cuts(same_bits, case, 128, [[100, 101, 127, 128, 129], [16], [128]]) > 0
    torch.set_num_threads(2)
    assert compare_cuts(same_bits, case, 128, [[131], [149]]) > 0


def test_another_order_of_sums_has_other_bits(same_bits) -> None:
    """The control of controls: the recurrence, and a chunk over the rows there are, are close and not the same."""
    case = Case.random(33, TINY, F32)
    case = replace(case, state=torch.zeros_like(case.state))
    whole = run([case], 16)[0]
    inputs = [getattr(case, name) for name in (*ROW_NAMES, "a", "skip")]
    for other in (recurrence(*inputs), truth(case, 16, 0, F32)[0]):
        assert torch.allclose(other, whole, rtol=1e-4, atol=1e-4)
        with pytest.raises(AssertionError, match="differ"):
            same_bits(other, whole, "another order")


def test_threads_change_no_bit(same_bits) -> None:
    """One chunk of one head alone, where more threads than products are idle."""
    case, count = Case.random(130, (1, 16, 1, 32)), 0
    whole = run([case], 128)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        count += same_bits(run([case], 128), whole, f"{threads} threads")
        count += same_bits(feed(case, 128, range(100, 130)), whole, f"{threads} threads, by rows")
    assert count > 0


def test_packed_documents_and_backward_F01(same_bits) -> None:
    """1, 0, 129 and 3 rows in one pack: output and gradients of each are those that it has alone, bit for bit; a
    change in document 1 is not seen by the others."""
    first = Case.random(1)
    docs = [first, *(Case.random(n).like(first) for n in (0, 129, 3))]
    grad_y = [torch.randn(case.x.shape).bfloat16() for case in docs]
    count = 0

    def gradients(cases: list[Case], dy: list[Tensor]) -> list[tuple[Tensor, ...]]:
        leaves = [[getattr(case, n).clone().requires_grad_() for n in ROW_NAMES] for case in cases]
        fresh = [
            replace(case, **dict(zip(ROW_NAMES, leaf, strict=True)))
            for case, leaf in zip(cases, leaves, strict=True)
        ]
        y, _ = run(fresh, 128)
        grads = torch.autograd.grad(y, list(itertools.chain(*leaves)), torch.cat(dy))
        ys = y.detach().split([len(case.x) for case in cases])
        return [(ys[s], *grads[4 * s : 4 * s + 4]) for s in range(len(cases))]

    together = gradients(docs, grad_y)
    for s in range(len(docs)):
        (alone,) = gradients([docs[s]], [grad_y[s]])
        count += same_bits(alone, together[s], f"document {s}", empty=s == 1)
    assert count > 0
    changed = replace(docs[0], x=docs[0].x + 1)
    other = gradients([changed, *docs[1:]], grad_y)
    assert not torch.equal(other[0][0], together[0][0])
    assert all(same_bits(other[s], together[s], f"document {s}") for s in (2, 3))


@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0, 0), ()], ids=str)
def test_empty_sequences_F02(same_bits, lengths: tuple[int, ...]) -> None:
    """No output for them, and no chunk fills, so their states stay what they were."""
    first = Case.random(0)
    cases = [Case.random(n).like(first) for n in lengths]
    if not lengths:
        grid = scan_grid(Step.of([]), first.slot(16), torch.zeros(0, dtype=torch.int64))
        inputs = [getattr(first, name) for name in (*ROW_NAMES, "a", "skip")]
        y, states = scan(*inputs, first.state[None][:0], grid)
    else:
        y, states = run(cases, 16)
    assert y.shape == (sum(lengths), 8, 16)
    assert y.dtype == BF16
    assert states.shape == (0, 8, 16, 32)
    if sum(lengths):
        alone = run([cases[lengths.index(5)]], 16)
        assert same_bits((y, states), alone, "beside nobody") > 0


def test_past_within_a_chunk_D04(same_bits) -> None:
    """100, 60 and 200 new rows after 37, 0 and 122 in the open chunk, states carried, chunk 128: each as alone."""
    past = (37, 0, 122)
    first = Case.random(137)
    cases = [first, Case.random(60).like(first), Case.random(322).like(first)]
    y, states = run(cases, 128, past)
    count, starts = 0, (0, 100, 160, 360)
    for s, (case, p) in enumerate(zip(cases, past, strict=True)):
        alone, ends = run([case], 128, [p])
        count += same_bits(alone, y[starts[s] : starts[s + 1]], f"sequence {s}")
        mine = states[{0: slice(0, 1), 1: slice(1, 1), 2: slice(1, 3)}[s]]
        count += same_bits(ends, mine, f"states of sequence {s}", empty=s == 1)
    assert count == y.numel() + states.numel() > 0


@pytest.mark.parametrize("limit", [(0.0, torch.inf), (0.001, 0.1)], ids=str)
def test_time_steps_D12(same_bits, limit: tuple[float, float]) -> None:
    """Time steps of 0.0005, 0.2 and 50 after the softplus: clamped by the limit given and by nothing else, the same in
    whole and row by row."""
    wanted = torch.tensor([0.0005, 0.2, 50.0], dtype=torch.float64)
    dt = softplus(torch.log(torch.expm1(wanted)).float()).clamp(*limit)
    assert torch.allclose(dt.double(), wanted.clamp(*limit), rtol=1e-5)
    case = Case.random(40, TINY, F32)
    case = replace(case, dt=dt[torch.randint(3, (40, 8))], state=torch.zeros_like(case.state))
    y, states = run([case], 16)
    assert same_bits(feed(case, 16, range(1, 40)), (y, states), "row by row") > 0
    want = recurrence(*(getattr(case, name).double() for name in (*ROW_NAMES, "a", "skip")))
    # A weight e^{d_i - d_j} is off by the float32 ulps of the larger sum of dt * a.
    largest = float((case.dt * case.a).abs().cumsum(0).max())
    bound = 1e-6 * (1 + largest) * float(want.abs().max())
    assert float((y.double() - want).abs().max()) < bound


@pytest.mark.parametrize("log_a", [-9.0, 5.0], ids=lambda v: f"A_log{v:g}")
def test_long_decode_D01(log_a: float) -> None:
    """200 rows one at a time, decay slow or large: as the recurrence in float64, where a 16-bit state drifts off."""
    case = Case.random(200, (4, 16, 1, 32), F32)
    case = replace(case, a=torch.full((4,), -1.0) * torch.exp(torch.tensor(log_a)))
    case = replace(case, state=torch.zeros_like(case.state))
    y, states = feed(case, 128, range(1, 200))
    assert states.dtype == F32
    inputs = [getattr(case, name).double() for name in (*ROW_NAMES, "a", "skip")]
    want = recurrence(*inputs)
    error = float((y.double() - want).abs().max()) / float(want.abs().max())
    assert error < 2e-5
    state, rows = torch.zeros_like(case.state), []
    for t in range(200):
        state = torch.exp(case.dt[t] * case.a)[:, None, None] * state
        state = state + (case.dt[t, :, None] * case.x[t])[..., None] * case.b[t, :, None]
        state = state.bfloat16().float()
        rows.append((state * case.c[t, :, None]).sum(-1) + case.skip[:, None] * case.x[t])
    drift = float((torch.stack(rows).double() - want).abs().max()) / float(want.abs().max())
    assert drift > 20 * error


def test_a_later_row_that_is_not_finite_is_outside_the_promise() -> None:
    """What README.md says of it: a row of inf reaches earlier rows of its chunk (0 * inf), and no earlier chunk."""
    case = Case.random(40)
    case.x[20] = torch.inf
    y, _ = run([case], 16)
    assert bool(y[:16].isfinite().all())
    assert bool(y[16:20].isnan().any())
