"""A start-up check of the property everything stands on: a tile's bits do not depend on place, columns or threads."""

import functools

import torch

from unified_models.ops.linear.cpu import TILE, tiled_mm


class NotExactError(RuntimeError, ValueError):
    """This process or machine cannot keep the bits; a ValueError too, as every refusal of the house is."""


@functools.lru_cache(maxsize=1)
def probe() -> None:
    """Once in a process, under 50 ms. Raises NotExactError where this machine's matrix product breaks the promise."""
    threads = torch.get_num_threads()
    generator = torch.Generator().manual_seed(0)
    faults = []
    for K, N in ((128, 128), (320, 48), (1024, 16)):
        x = torch.randn(3 * TILE + 5, K, generator=generator)
        w = torch.randn(N, K, generator=generator)
        torch.set_num_threads(1)
        whole = tiled_mm(x, w)
        alone = torch.cat([tiled_mm(x[i : i + 1], w) for i in (0, 17, len(x) - 1)])
        if not torch.equal(alone, whole[[0, 17, len(x) - 1]]):
            faults.append(f"rows (K {K}, N {N})")
        if not torch.equal(tiled_mm(x, w[:16]), whole[:, :16]):
            faults.append(f"columns (K {K}, N {N})")
        for count in sorted({2, threads}):
            torch.set_num_threads(count)
            # A single tile is what threads would share if they could.
            if not (
                torch.equal(tiled_mm(x, w), whole) and torch.equal(tiled_mm(x[:1], w), whole[:1])
            ):
                faults.append(f"1 against {count} threads (K {K}, N {N})")
    torch.set_num_threads(threads)
    if faults:
        raise NotExactError(
            "this machine's float32 matrix product is not row-invariant on 16-row tiles: "
            + ", ".join(faults)
            + "; exact bits cannot be kept (is MKL_CBWR or another code path set?)"
        )
