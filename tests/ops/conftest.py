"""What the tests of operators share: rows that must keep their bits, and gradients against a float64 reference."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from unified_models.weight import Weight

PACKS = {  # by the number of threads
    1: (1, 2, 3, 7, 8, 15, 16, 17, 31, 32, 33, 64, 100, 129),
    2: (1, 8, 17, 64, 129),
}
EPS = torch.finfo(torch.float32).eps
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(x: Tensor) -> Tensor:
    """The bit patterns of x as whole numbers: NaNs and zeros of either sign are told apart."""
    return x.contiguous().view(INTEGERS[x.element_size()])


def parts(x: Any) -> tuple[Tensor, ...]:
    return tuple(x) if isinstance(x, tuple | list) else (x,)


def compare_bits(got: Any, want: Any, where: str, *, empty: bool = False) -> int:
    """The number of values compared; AssertionError names the first that differs, or says that there was none. empty:
    there may be none here; the caller looks at the sum."""
    count = 0
    for n, (a, b) in enumerate(zip(parts(got), parts(want), strict=True)):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), f"{where}: output {n}"
        unequal = bits(a) != bits(b)
        if bool(unequal.any()):
            i = tuple(unequal.nonzero()[0].tolist())
            told = f"{a[i].item()!r} is not {b[i].item()!r}"
            raise AssertionError(
                f"{where}: output {n} at {i}: {told}; {int(unequal.sum())} of {a.numel()} differ"
            )
        count += a.numel()
    assert count > 0 or empty, f"{where}: nothing was compared"
    return count


def off(got: Tensor, want: Tensor) -> float:
    """How far it is, as a part of the length of what is wanted."""
    return float((got.double() - want.double()).norm() / want.double().norm())


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Whatever waits for the GPU raises a RuntimeError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch says that this is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def wide_rows(x: Tensor) -> Tensor:
    """x in rows that lie further apart than they are long."""
    memory = x.new_zeros(*x.shape[:-1], x.shape[-1] + 5)
    memory[..., :-5] = x
    return memory[..., :-5]


def shifted(x: Tensor) -> Tensor:
    """x at an address that is a multiple of its element size and of nothing more."""
    memory = x.new_zeros(x.numel() + 1)
    memory[1:] = x.flatten()
    return memory[1:].view(x.shape)


def transposed(x: Tensor) -> Tensor:
    """x with its first dimension innermost in memory."""
    return x.movedim(0, -1).contiguous().movedim(-1, 0)


def one_ulp_off(op: Callable[..., Any], rows: int) -> Callable[..., Any]:
    """`op` with the last bit of one value flipped in every call on fewer than `rows` rows."""

    def faulty(*inputs: Tensor) -> Any:
        outs = [x.clone(memory_format=torch.contiguous_format) for x in parts(op(*inputs))]
        if len(inputs[0]) < rows:
            bits(outs[-1]).view(-1)[-1] ^= 1
        return tuple(outs)

    return faulty


def compare_packs(op: Callable[..., Any], inputs: Sequence[Tensor], packs: Iterable[int]) -> int:
    """Rows of the whole call against the same rows in smaller packs, at the start, in the middle and at the end."""
    whole, rows, count = parts(op(*inputs)), len(inputs[0]), 0
    for size in packs:
        for start in sorted({0, min(5, rows - size), rows - size}):
            part = slice(start, start + size)
            got = op(*(x[part] for x in inputs))
            count += compare_bits(got, [x[part] for x in whole], f"{size} rows from {start}")
    return count


def _check_rows(
    op: Callable[..., Any], *inputs: Tensor, nan: bool = True, layouts: bool = True
) -> int:
    """Every row of `op` keeps its bits: in packs of every size and place, on 1 and 2 threads, in another order, next
    to rows of NaN, from strided memory. Then the control: a single value off by one ulp must be found.

    inputs: at least 130 rows each; nan: whether rows of floats may be NaN. Returns how many values were compared.
    """
    rows = len(inputs[0])
    assert rows > max(PACKS[1])
    whole, count = parts(op(*inputs)), 0
    for threads, packs in PACKS.items():
        torch.set_num_threads(threads)
        count += compare_bits(op(*inputs), whole, f"again, {threads} threads")
        count += compare_packs(op, inputs, packs)
    torch.set_num_threads(1)
    order = torch.randperm(rows)
    count += compare_bits(op(*(x[order] for x in inputs)), [x[order] for x in whole], "shuffled")
    if nan:
        kept = torch.arange(rows) % 7 == 3
        dirty = [x.clone() for x in inputs]
        for x in dirty:
            if x.is_floating_point():
                x[~kept] = math.nan
        got = [x[kept] for x in parts(op(*dirty))]
        count += compare_bits(got, [x[kept] for x in whole], "next to rows of NaN")
    for layout in (wide_rows, shifted, transposed) if layouts else ():
        count += compare_bits(op(*map(layout, inputs)), whole, layout.__name__)
    assert count > 0, "nothing was compared"
    with pytest.raises(AssertionError, match="1 of"):
        compare_packs(one_ulp_off(op, rows), inputs, (1,))
    print(f"{count} values compared, none unequal")
    return count


def assert_close(name: str, got: Tensor, want: Tensor, terms: int) -> None:
    """One rounding to got's dtype, and float32 sums of `terms` terms: half an ulp of each value, and `terms` float32
    ulps of the largest (a sum of n terms loses at most n ulps of its largest partial sum)."""
    assert got.shape == want.shape, f"{name}: {tuple(got.shape)} is not {tuple(want.shape)}"
    own = torch.finfo(got.dtype).eps / 2 if got.dtype != torch.float64 else 0.0
    bound = own * want.abs() + terms * EPS * want.abs().max().clamp_min(1e-30)
    error = (got.double() - want).abs()
    assert bool((error <= bound).all()), (
        f"{name}: {float((error / bound).max()):.3g} times the bound"
    )


def _check_gradients(
    op: Callable[[], Any],
    reference: Callable[..., Any],
    leaves: dict[str, Tensor],
    *,
    terms: int,
) -> None:
    """`op()` and its gradient for every leaf, against `reference(**leaves)` in float64 with its autograd."""
    doubles = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    outs, wants = parts(op()), parts(reference(**doubles))
    cotangents = [torch.randn(x.shape).to(x.dtype) for x in outs]
    for n, (out, want) in enumerate(zip(outs, wants, strict=True)):
        assert_close(f"output {n}", out.detach(), want.detach(), terms)
    grads = torch.autograd.grad(outs, list(leaves.values()), cotangents)
    truths = torch.autograd.grad(wants, list(doubles.values()), [c.double() for c in cotangents])
    for (name, leaf), got, want in zip(leaves.items(), grads, truths, strict=True):
        assert got.dtype == leaf.dtype, f"gradient of {name} is {got.dtype}"
        assert bool(want.abs().max() > 0), f"the gradient of {name} is all zero: nothing is tested"
        assert_close(f"gradient of {name}", got, want, terms)


def _make_weight(values: Tensor, format: str = "bfloat16", **options: Any) -> Weight:
    """A committed Weight with these master values; a static input scale, if it has one, under which one normal value in
    fifty saturates."""
    axes_and_sizes = [part for size in values.shape for part in (None, size)]
    weight = Weight(*axes_and_sizes, format=format, **options)
    assert weight.master is not None
    with torch.no_grad():
        weight.master.copy_(values)
    weight.commit()
    if weight.input_scale is not None:
        weight.input_scale.assign(0.0045 * (1 + 0.2 * torch.rand(weight.input_scale.shape)))
    return weight


@pytest.fixture
def check_rows() -> Callable[..., int]:
    return _check_rows


@pytest.fixture
def check_gradients() -> Callable[..., None]:
    return _check_gradients


@pytest.fixture
def make_weight() -> Callable[..., Weight]:
    return _make_weight


@pytest.fixture
def same_bits() -> Callable[..., int]:
    return compare_bits
