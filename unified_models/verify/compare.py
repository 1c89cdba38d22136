"""Equality of bit patterns, and beside it the numbers that RL people look at, which never decide."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Tensor | Sequence[Tensor]

WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class UnequalError(ValueError):
    """Two things that must have the same bits do not, or nothing was compared."""


@dataclass(frozen=True)
class Gap:
    """How far two lists of logprobs are apart; float64 over the tokens where both are finite.

    max, mean, std: of |exp(a) - exp(b)|. k3: mean of e^(b - a) - (b - a) - 1, the KL estimate of tokens sampled under
    a. All are 0 where nothing is valid. They are blind near p = 1: equal numbers do not mean equal bits.
    """

    valid: int
    max: float
    mean: float
    std: float
    k3: float

    def __str__(self) -> str:
        return f"valid {self.valid}, max {self.max:.3g}, mean {self.mean:.3g}, std {self.std:.3g}, k3 {self.k3:.3g}"


@dataclass(frozen=True)
class Comparison:
    """compared, unequal: elements. first: the first unequal one, as (index, bit pattern of a, bit pattern of b);
    the index leads with the tensor's number where lists were compared. bytes: of one element."""

    compared: int
    unequal: int
    first: tuple[tuple[int, ...], int, int] | None = None
    bytes: int = 4

    def __add__(self, other: "Comparison") -> "Comparison":
        """Both together; `first` is that of the left one if it has any."""
        return Comparison(
            self.compared + other.compared,
            self.unequal + other.unequal,
            self.first or other.first,
            self.bytes if self.first or not other.first else other.bytes,
        )

    def __str__(self) -> str:
        text = f"{self.unequal} of {self.compared} unequal"
        if self.first:
            index, a, b = self.first
            width = 2 * self.bytes + 2
            text += f", first at {list(index)}: {a:#0{width}x} and {b:#0{width}x}"
        return text


def patterns(x: Tensor) -> Tensor:
    """The elements' bits as whole numbers of the same size; a NaN is its pattern, -0 is not +0."""
    if x.dtype == torch.bool:
        return x.to(torch.uint8)
    return x.detach().contiguous().view(WHOLE[x.dtype.itemsize])


def bits(a: Tensors, b: Tensors, mask: Tensors | None = None) -> Comparison:
    """Compare bit patterns of two tensors, or of two lists of tensors, of the same shapes and dtypes.

    mask: bool, the elements to compare; None: all.

    Raises ValueError naming both where numbers of tensors, shapes or dtypes differ.
    """
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        assert mask is None or isinstance(mask, Tensor)
        return _bits(a, b, mask)
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        raise ValueError(f"a is a {type(a).__name__} and b a {type(b).__name__}")
    if len(a) != len(b):
        raise ValueError(f"a has {len(a)} tensors and b {len(b)}")
    masks = [None] * len(a) if mask is None else list(mask)
    if len(masks) != len(a):
        raise ValueError(f"mask has {len(masks)} tensors and a {len(a)}")
    total = Comparison(0, 0)
    for i, (x, y, m) in enumerate(zip(a, b, masks, strict=True)):
        try:
            one = _bits(x, y, m)
        except ValueError as error:
            raise ValueError(f"tensor {i}: {error}") from None
        if one.first:
            index, p, q = one.first
            one = Comparison(one.compared, one.unequal, ((i, *index), p, q), one.bytes)
        total += one
    return total


def _bits(a: Tensor, b: Tensor, mask: Tensor | None) -> Comparison:
    if a.shape != b.shape:
        raise ValueError(f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}")
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b {b.dtype}")
    p, q = patterns(a).cpu(), patterns(b).cpu()
    different = p != q
    compared, size = p.numel(), p.element_size()
    if mask is not None:
        if mask.shape != a.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"mask is {mask.dtype} {tuple(mask.shape)}, expected torch.bool {tuple(a.shape)}"
            )
        different, compared = different & mask.cpu(), int(mask.sum())
    if not bool(different.any()):
        return Comparison(compared, 0, bytes=size)
    index = tuple(int(i) for i in different.nonzero()[0])
    top = (1 << 8 * size) - 1
    first = (index, int(p[index]) & top, int(q[index]) & top)
    return Comparison(compared, int(different.sum()), first, size)


def require_equal(
    a: Tensors, b: Tensors, what: str = "a and b", mask: Tensors | None = None
) -> int:
    """Raise `UnequalError` unless all bits are equal and there were some; returns how many elements were compared."""
    result = bits(a, b, mask)
    if result.compared == 0:
        raise UnequalError(f"{what}: nothing was compared (0 elements)")
    if result.unequal:
        raise UnequalError(f"{what}: {result}")
    return result.compared


def gap(a: Tensors, b: Tensors, mask: Tensors | None = None) -> Gap:
    """The five numbers of two lists of logprobs of the same shapes; see `Gap`. mask: the tokens that count."""
    x, y = _flat(a), _flat(b)
    if x.shape != y.shape:
        raise ValueError(f"a has {len(x)} logprobs and b {len(y)}")
    valid = x.isfinite() & y.isfinite()
    if mask is not None:
        valid &= _flat(mask).bool()
    x, y = x[valid], y[valid]  # selected before exp, so that what is masked cannot overflow
    if not len(x):
        return Gap(0, 0.0, 0.0, 0.0, 0.0)
    apart = (x.exp() - y.exp()).abs()
    k3 = ((y - x).expm1() - (y - x)).mean()
    return Gap(
        len(x), float(apart.max()), float(apart.mean()), float(apart.std(correction=0)), float(k3)
    )


def _flat(x: Tensors) -> Tensor:
    """float64, one dimension."""
    parts = [x] if isinstance(x, Tensor) else list(x)
    return torch.cat(
        [torch.zeros(0, dtype=torch.float64), *(p.detach().cpu().double().flatten() for p in parts)]
    )
