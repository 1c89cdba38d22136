"""Compiling DeepGEMM's kernels: a process multiplies with one shape of weight at every number of rows that matters.

A kernel is compiled by nvcc, in seconds, when a product first asks for it, and lies on disk from then on
(DG_JIT_CACHE_DIR; release 2.5 without it: ~/.deep_gemm); a product whose kernel is there takes microseconds.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from unified_models.formats.activations import GROUP
from unified_models.ops.linear import narrow
from unified_models.progress import bar
from unified_models.warm.products import Product

EACH = 2048
"""Every number of rows is tried up to here. Smallest tiles (16 and 32 rows) and whether rows fill a tile or allow
multicast (512) decide there, too; beyond, how many tiles of 64 rows there are, and so their multiples are tried."""
TILE = 64
LARGEST = 1 << 30
"""Bytes of a result. A head's rows are those that are sampled, and no step samples 8192 tokens of 129,280."""
Work = Callable[[Product, Sequence[int]], None]


def rows(product: Product, tokens: int) -> list[int]:
    """The numbers of rows M to multiply at, ascending, so that any M up to `tokens` finds its kernel: fewer where the
    result would be larger than LARGEST. ValueError: no tokens."""
    if tokens < 1:
        raise ValueError(f"tokens must be at least 1, got {tokens}")
    row = product.groups * product.N * product.dtype.itemsize
    most = min(tokens, max(LARGEST // row, 1))
    tried = {*range(1, min(most, EACH) + 1), *range(EACH, most + 1, TILE), most}
    return sorted(tried)


def require_deep_gemm() -> None:
    """ValueError: no GPU, or none that DeepGEMM multiplies on."""
    if not torch.cuda.is_available():
        raise ValueError(
            "no GPU here, and DeepGEMM's kernels are compiled on the one that runs them"
        )
    if narrow.deep_gemm_release() is None:
        raise ValueError(
            f"nothing to compile: deep_gemm is not installed, or {torch.cuda.get_device_name()} is no Hopper GPU; "
            "Triton multiplies instead"
        )


def warm(
    products: Sequence[Product],
    tokens: int = 8192,
    processes: int | None = None,
    work: Work | None = None,
) -> None:
    """Compile what `products` need for any number of rows up to `tokens`, one product a process, `processes` at a time
    (None: a core each); what is on disk already is not compiled again. A bar shows it on a terminal.

    Processes are spawned, so a script that calls this has `if __name__ == "__main__"`. work: what a process does with
    a product and numbers of rows, instead of multiplying.
    Raises ValueError before a process starts: tokens or processes below 1, no GPU, no DeepGEMM. RuntimeError naming the
    product whose kernel could not be compiled.
    """
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1, got {processes}")
    jobs = [(product, rows(product, tokens)) for product in products]
    if work is None:
        require_deep_gemm()
    if not jobs:
        return
    count = min(processes or os.cpu_count() or 1, len(jobs))
    with (
        bar("compiling DeepGEMM's kernels, product", len(jobs)) as shown,
        ProcessPoolExecutor(count, mp_context=get_context("spawn")) as pool,
    ):
        running = {pool.submit(work or multiply, *job): job[0] for job in jobs}
        for done in as_completed(running):
            error = done.exception()
            if error is not None:
                pool.shutdown(cancel_futures=True)
                raise RuntimeError(f"{running[done]}: {error}") from error
            shown.advance(1)


def warm_apart(path: Path, tokens: int) -> None:
    """`unified-models warm PATH` in a process of its own, for one that may not spawn: an engine's, whose script has no
    `if __name__ == "__main__"`. RuntimeError with its exit status; it has said why."""
    command = [sys.executable, "-m", "unified_models.warm", str(path), "--tokens", str(tokens)]
    status = subprocess.run(command).returncode
    if status:
        raise RuntimeError(f"{' '.join(command[1:])}: exit status {status}")


def multiply(product: Product, sizes: Sequence[int], device: str = "cuda") -> None:
    """x @ w.T at each number of rows, as a linear asks for it; zeros, since no kernel is chosen by values."""
    G, N, K = product.groups, product.N, product.K
    sizes = sorted(sizes, reverse=True)  # the largest first: its memory serves the others
    stack = (G,) if G > 1 else ()
    x = torch.zeros(sizes[0], *stack, K, dtype=torch.bfloat16, device=device)
    w = torch.zeros(G, N, K, dtype=torch.bfloat16, device=device)
    if product.fp8:
        from unified_models.ops.quantize_triton import quantize_rows

        codes = w.to(torch.float8_e4m3fn)
        scales = torch.ones(G, N // GROUP, K // GROUP, device=device)
        for M in sizes:
            seen = quantize_rows(x[:M], torch.float8_e4m3fn, tokens_last=True)
            narrow.deep_scaled_product(*seen, codes, scales)
    else:
        for M in sizes:
            narrow.deep_product(x[:M], w[0], product.dtype)
    if x.is_cuda:
        torch.cuda.synchronize()
