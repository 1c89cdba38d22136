"""What a weight is: a master parameter, the logical axis of each dimension, and a number format."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unified_models import formats
from unified_models.autograd import apply
from unified_models.formats import Format, Packed
from unified_models.formats.activations import dequantized_rows, static_codes
from unified_models.operands import Operands
from unified_models.sharding import Sharding, whole

Version = tuple[int, int]


@dataclass(frozen=True)
class Reading:
    """A weight as one forward sees it: packed bytes to compute with, a master to send gradients to."""

    weight: "Weight"
    packed: Packed
    version: Version

    @property
    def format(self) -> Format:
        return self.weight.format

    @property
    def master(self) -> Tensor | None:
        return self.weight.master

    @property
    def shape(self) -> torch.Size:
        return self.weight.shape

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of the master's gradient: float32, or what the master was cast to."""
        assert self.master is not None, f"{self.weight.label}: packed bytes have no gradient"
        sharded = self.weight.sharding is not None
        return torch.float32 if sharded else self.master.dtype

    @property
    def value(self) -> Tensor:
        """float32 values of the packed bytes; the gradient goes straight through to the master."""
        if self.master is None:
            return self.operand(Reading.dequantized)  # type: ignore[no-any-return]
        return apply(_Value, self.master, self)

    def dequantized(self) -> Tensor:
        """float32 values of the packed bytes, outside autograd."""
        return self.format.unpack(self.packed, self.shape).view(self.shape)

    def operand(self, build: Callable[["Reading"], Any]) -> Any:
        """`build(self)`, kept as long as the packed bytes: a kernel's own form of the same bytes."""
        sharding = self.weight.sharding
        if sharding is not None and not sharding.resident:
            return build(self)
        return self.weight.operand(self, build)

    @property
    def input_scale(self) -> Tensor:
        """float32 [] or, for a stack, [E]: the scale of the input of a format that asks for one ("static")."""
        scale = self.weight.input_scale
        assert scale is not None, f"{self.weight.label}: {self.format.name} without an input scale"
        return scale().dequantized()  # type: ignore[no-any-return]

    def seen(self, x: Tensor, index: int | None = None) -> Tensor:
        """float32 values that a linear with this weight sees instead of x [T, K]. index: of a matrix of a stack."""
        if self.format.input == "dynamic":
            return dequantized_rows(x)
        if self.format.input == "static":
            scale = self.input_scale if index is None else self.input_scale[index]
            return static_codes(x, scale) * scale
        return x.float()

    def check(self) -> None:
        """Refuse a backward whose master changed since its forward."""
        if self.weight.version != self.version:
            raise RuntimeError(
                f"{self.weight.label}: the master changed between forward and backward "
                f"(version {self.version} then, {self.weight.version} now)"
            )


class _Value(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, master: Tensor, reading: Reading) -> Tensor:
        ctx.reading = reading
        return reading.dequantized()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.reading.check()
        return grads[0].to(ctx.reading.grad_dtype), None


class Weight(nn.Module):
    """Weight("heads", H * D, None, M): a logical axis (None: never sharded) and a size for each dimension.

    Args:
        format: name of a weight format. None: whatever the checkpoint holds. "float32" is a float32-compute
            parameter: it is never cast, whatever `.to(dtype)` or a numerics setting asks.
        frozen: no gradient.
        groups: the first dimension is this many matrices, stacked; a linear takes x of shape [T, groups, K].
        init: how `make_tiny` fills it, a name in `tiny.INITS`; None: by its shape and format.
        default: what a checkpoint means that lacks it; None: it must be there.
        positive: every value is a finite number above 0, as a loader and an update check: a scale.

    `version` moves when the master does; `commit()` derives the packed bytes from the master. Calling a weight whose
    master is newer than its packed bytes raises RuntimeError.
    """

    packed_names: tuple[str, ...] = ()

    def __init__(
        self,
        *axes_and_sizes: str | int | None,
        format: str | None = "bfloat16",
        frozen: bool = False,
        groups: int = 1,
        init: str | None = None,
        default: float | None = None,
        positive: bool = False,
    ) -> None:
        super().__init__()
        self.axes = axes_and_sizes[0::2]
        self.shape = torch.Size(int(size) for size in axes_and_sizes[1::2] if isinstance(size, int))
        assert len(self.shape) == len(self.axes), f"a size for each axis, got {axes_and_sizes}"
        self.groups, self.frozen, self.init, self.label = groups, frozen, init, "weight"
        self.declared, self.default, self.positive = format, default, positive
        self.input_scale: Weight | None = None
        """of a format whose input has one scale for all tokens; comes with the checkpoint and is never trained"""
        self.format = self.stored = formats.find(format or "bfloat16")
        """`format` is what a forward reads; `stored` is what a checkpoint holds, whatever the numerics setting"""
        self.master: nn.Parameter | None
        self.register_parameter(
            "master",
            nn.Parameter(torch.empty(self.shape, dtype=torch.float32), requires_grad=not frozen),
        )
        self.first, self.stack = 0, self.shape[0] if self.shape else 1
        """of a stack of which this process holds a stretch: the number of its first matrix, and matrices in all"""
        self.sharding: Sharding | None = None
        self.bumps = 0
        self.commits = 0
        self.committed: Version | None = None
        self._operands = Operands()
        self.bind(self.format.name)

    @property
    def exact(self) -> bool:
        """Whether this is a float32-compute parameter of the architecture."""
        return self.declared == "float32"

    @property
    def version(self) -> Version:
        """Counts every change of the master that torch or this class can see (not writes through `.data`)."""
        owned = self.owned
        return (0 if owned is None else owned._version, self.bumps)

    @property
    def owned(self) -> Tensor | None:
        """The master as an optimizer has it: whole, or cut over processes."""
        return self.master if self.sharding is None else self.sharding.owned

    @property
    def part_of_stack(self) -> bool:
        """Whether other processes hold the other matrices of its stack."""
        return self.shape[:1] not in ((), (self.stack,))

    def require_committed(self) -> None:
        """RuntimeError: the master is newer than the packed bytes."""
        if self.committed != self.version:
            state = (
                "was never committed" if self.committed is None else "changed since the last commit"
            )
            raise RuntimeError(
                f"{self.label}: the master {state}; call model.commit() before a forward"
            )

    def forward(self) -> Reading:
        self.require_committed()
        if self.sharding is not None:
            self.sharding.meet(self.master)
            if not self.sharding.resident:
                assert self.master is not None
                values = whole(self.master.detach())
                return Reading(self, formats.pack_pieces(self.format, values), self.version)
        return Reading(
            self, {name: getattr(self, name) for name in self.packed_names}, self.version
        )

    def whole(self) -> Tensor:
        """The master's values, in full and outside autograd; where they are sharded, every process must ask."""
        assert self.owned is not None, f"{self.label}: holds packed bytes only"
        return whole(self.owned.detach())

    @torch.no_grad()
    def commit(self) -> None:
        """Derive the packed bytes from the master, into the same storage."""
        if self.master is None:
            raise RuntimeError(
                f"{self.label}: holds packed bytes only, there is no master to commit"
            )
        if self.sharding is not None:
            if self.committed != self.version:
                self.sharding.renew()
            if not self.sharding.resident:
                return self._kept()
        self.keep(formats.pack_pieces(self.format, self.whole()))

    @torch.no_grad()
    def assign(self, values: Tensor, index: int | None = None) -> None:
        """Take new master values (any float dtype; bf16 rounding is the format's), and commit.

        index: `values` are this one matrix of the first dimension; the others stay.
        """
        if self.sharding is not None:
            raise ValueError(
                f"{self.label}: the master is cut over processes, and takes no whole values"
            )
        current = self.committed == self.version
        self.bumps += 1
        if self.master is not None:
            target = self.master if index is None else self.master[index]
            target.copy_(values)
            if index is None or not current:
                return self.commit()
            values = target
        if index is None:
            return self.keep(formats.pack_pieces(self.format, values))
        for name, piece in self.format.pack(values).items():
            getattr(self, name)[index].copy_(piece)
        self._kept()

    @torch.no_grad()
    def keep(self, packed: Packed) -> None:
        """Hold these packed bytes, in place where there is storage of the same shape and dtype already."""
        for name in set(self.packed_names) - set(packed):
            delattr(self, name)
        for name, new in packed.items():
            old = getattr(self, name, None) if name in self.packed_names else None
            if old is not None and (old.shape, old.dtype, old.device) == (
                new.shape,
                new.dtype,
                new.device,
            ):
                old.copy_(new)
            elif name in self.packed_names:
                setattr(self, name, new.clone())
            else:
                self.register_buffer(name, new.clone(), persistent=False)
        self.packed_names = tuple(packed)
        self._kept()

    def let_go(self) -> None:
        """Hold no packed bytes: they are derived at each reading."""
        for name in self.packed_names:
            delattr(self, name)
        self.packed_names = ()
        self._operands.clear()

    def _kept(self) -> None:
        self.commits += 1
        self.committed = self.version

    def hold(self, first: int, count: int) -> None:
        """Of a stack, hold matrices first, first + 1, ... alone. Before any values are there."""
        self.first, self.shape = first, torch.Size((count, *self.shape[1:]))
        self.master = nn.Parameter(
            torch.empty(self.shape, dtype=torch.float32), requires_grad=not self.frozen
        )
        self.committed = None
        if self.input_scale is not None:
            self.input_scale.hold(first, count)

    def drop_master(self) -> None:
        """Hold packed bytes only, as a serving process may."""
        self.master = None
        self.committed = self.version

    def bind(self, format: str) -> None:
        """Choose another number format; the packed bytes must be committed again."""
        self.format = formats.find(format)
        self.committed = None
        if self.format.input == "static" and self.input_scale is None:
            stack = [part for pair in zip(self.axes, self.shape, strict=True) for part in pair][:-4]
            self.input_scale = Weight(
                *stack, format="float32", frozen=True, init="input_scale", positive=True
            )
            self.input_scale.first = self.first
            self.input_scale.label = f"{self.label}.input_scale"

    def check(self, values: Tensor, name: str) -> None:
        """Raise ValueError naming the first of `values` that this weight cannot hold."""
        if self.positive:
            check_scales(values, name)

    @property
    def _commits(self) -> tuple[int, int]:
        return self.commits, self.input_scale.commits if self.input_scale else 0

    def operand(self, reading: Reading, build: Callable[[Reading], Any]) -> Any:
        """See `Reading.operand`."""
        return self._operands.of(reading, self._commits, build)

    def refresh(self) -> None:
        """Bring what kernels keep of this weight up to date, for a recorded graph that will not ask."""
        self._operands.refresh(self(), self._commits)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Weight":
        """Device moves are followed; dtype casts reach the master of a packed weight and nothing else.

        After a cast that could pack to other bytes, the weight must be committed again.
        """
        kept = self.committed == self.version
        before = None if self.master is None else self.master.dtype

        def move(t: Tensor) -> Tensor:
            master = self.master
            castable = not self.exact and master is not None and (t is master or t is master.grad)
            return fn(t) if castable else on_device_of(fn, t)

        super()._apply(move, recurse)  # type: ignore[no-untyped-call]
        self._operands.clear()
        if self.master is not None and before is not None:
            kept = kept and self._packs_alike(before, self.master.dtype)
        self.committed = self.version if kept else None
        return self

    def _packs_alike(self, before: torch.dtype, after: torch.dtype) -> bool:
        """Whether every master cast so packs to the bytes it packed to before: nothing is lost, or only what packing
        rounds away itself."""
        if torch.promote_types(before, after) == after:
            return True
        rounds = self.format.name != "float32"
        return rounds and (before, after) == (torch.float32, torch.bfloat16)

    def extra_repr(self) -> str:
        axes = ", ".join(
            f"{axis or '-'}={size}" for axis, size in zip(self.axes, self.shape, strict=True)
        )
        return f"{axes}, {self.format.name}{', frozen' if self.frozen else ''}"


def on_device_of(fn: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
    """`t` on the device to which `fn` would take it, in its own dtype."""
    target = fn(torch.empty(0, dtype=t.dtype, device=t.device)).device
    return t if target == t.device else t.to(target)


def check_scales(scales: Tensor, name: str, *, zero: bool = False) -> None:
    """Raise ValueError naming the first of these scales that is not a finite number above 0 (or 0, if `zero`)."""
    values = scales.float()
    bad = ~(((values >= 0) if zero else (values > 0)) & values.isfinite())
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        at = list(place) if place else ""
        raise ValueError(f"{name}{at} is {values[place].item()}, expected a finite number above 0")


class Table(nn.Module):
    """A whole-number table that the forward reads, such as a hash-routing table; int64, never cast.

    upper: entries are in [0, upper), as a loader and an update check. None: not checked.
    """

    data: Tensor

    def __init__(self, *axes_and_sizes: str | int | None, upper: int | None = None) -> None:
        super().__init__()
        self.upper = upper
        self.axes = axes_and_sizes[0::2]
        self.shape = torch.Size(int(size) for size in axes_and_sizes[1::2] if isinstance(size, int))
        self.label = "table"
        self.register_buffer("data", torch.zeros(self.shape, dtype=torch.int64))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "Table":
        """Device moves are followed, casts are not."""
        super()._apply(lambda t: on_device_of(fn, t), recurse)  # type: ignore[no-untyped-call]
        return self

    def check(self, values: Tensor, name: str) -> None:
        """Raise ValueError naming the first entry of `values` that this table cannot hold."""
        if self.upper is None or not values.numel():
            return
        bad = (values < 0) | (values >= self.upper)
        if bad.any():
            place = tuple(bad.nonzero()[0].tolist())
            raise ValueError(
                f"{name}{list(place)} is {values[place].item()}, expected 0 to {self.upper - 1}"
            )

    def forward(self) -> Tensor:
        return self.data
