"""A start-up check of the property everything stands on: a row's bits do not depend on place, columns or threads."""

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from unified_models.ops.linear import narrow
from unified_models.ops.linear.arithmetic import TILE, tiled_mm
from unified_models.ops.sums import row_sum

SIZES = ((128, 128), (320, 48), (1024, 16))
PLACES = (0, 17, 3 * TILE + 4)


class NotExactError(RuntimeError, ValueError):
    """This process or machine cannot keep the bits; a ValueError too, as every refusal of the house is."""


@functools.lru_cache(maxsize=2)
def probe(kind: str) -> None:
    """Once in a process and kind of device, under 50 ms on CPU. Raises NotExactError where this machine's products or
    sums break the promise."""
    faults = list(cpu_faults() if kind == "cpu" else faults_on(torch.device(kind)))
    if faults:
        raise NotExactError(
            f"this machine's float32 products or sums are not row-invariant on {kind}: "
            + ", ".join(faults)
            + "; exact bits cannot be kept (is MKL_CBWR or another code path set?)"
        )


def faults_on(device: torch.device) -> Iterator[str]:
    """Rows alone against rows among others, and fewer columns against more."""
    generator = torch.Generator().manual_seed(0)
    for K, N in SIZES:
        x = torch.randn(max(PLACES) + 1, K, generator=generator).to(device)
        w = torch.randn(N, K, generator=generator).to(device)
        whole, sums = tiled_mm(x, w), row_sum(x)
        rows = [x[i : i + 1] for i in PLACES]
        if not same([tiled_mm(row, w) for row in rows], whole):
            yield f"rows (K {K}, N {N})"
        if not torch.equal(tiled_mm(x, w[:16]), whole[:, :16]):
            yield f"columns (K {K}, N {N})"
        if x.is_cuda:
            few, many = (
                [narrow.product(t.bfloat16(), w.bfloat16()) for t in ts] for ts in (rows, [x])
            )
            if not same(few, many[0]):
                yield f"rows on tensor cores (K {K}, N {N})"
        if not same([row_sum(row) for row in rows], sums):
            yield f"sums (K {K})"


def same(parts: list[Tensor], whole: Tensor) -> bool:
    """Whether these are the rows of `whole` at PLACES."""
    return torch.equal(torch.cat(parts), whole[list(PLACES)])


def cpu_faults() -> Iterator[str]:
    """Those of one thread, and products on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield from faults_on(torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for K, N in SIZES:
        x = torch.randn(max(PLACES) + 1, K, generator=generator)
        w = torch.randn(N, K, generator=generator)
        torch.set_num_threads(1)
        whole = tiled_mm(x, w)
        for count in sorted({2, threads}):
            torch.set_num_threads(count)
            # A single tile is what threads would share if they could.
            if not (
                torch.equal(tiled_mm(x, w), whole) and torch.equal(tiled_mm(x[:1], w), whole[:1])
            ):
                yield f"1 against {count} threads (K {K}, N {N})"
    torch.set_num_threads(threads)
