"""Rows as kernels read them: contiguous, and one stride apart."""

from torch import Tensor

LANE = 16
"""Elements that a kernel may load at once where every row begins at a multiple of them."""


def rows_of(x: Tensor) -> Tensor:
    """x [..., N] as [R, N] whose last dimension is contiguous: a view where x allows one."""
    flat = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return flat if flat.stride(1) == 1 else flat.contiguous()


def lane_of(N: int) -> int:
    """Elements that all rows of so many values are multiples of: a number of N alone."""
    return LANE if N % LANE == 0 else 1


def whole_rows(x: Tensor, lane: int) -> tuple[Tensor, int]:
    """x [..., N] as [R, N], from an address that is a multiple of 16 bytes, and its stride in lanes. A copy only where
    memory is not so: how a kernel lays out its threads, and so its order of sums, follows from what it may assume."""
    flat = rows_of(x)
    if flat.stride(0) % lane and len(flat) > 1:
        flat = flat.contiguous()
    if flat.data_ptr() % LANE:
        flat = flat.contiguous().clone() if flat.is_contiguous() else flat.contiguous()
    return flat, flat.stride(0) // lane


def aligned(x: Tensor) -> Tensor:
    """x, contiguous and from an address that is a multiple of 16 bytes; a copy only where it is not."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % LANE else x
