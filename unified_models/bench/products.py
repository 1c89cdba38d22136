"""A linear's products on a GPU, side by side: `python -m unified_models.bench.products`.

Bits first: rows alone against the same rows among 4096, and DeepGEMM against Triton. Then times under CUDA graphs, so
that no launch is counted, the providers in turn in each round.
"""

import sys
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unified_models.bench.conditions import machine
from unified_models.ops.linear import narrow
from unified_models.verify.compare import bits

SHAPES = ((4096, 4096), (2688, 10304), (4096, 129280))
"""K, N: square, Nemotron 30B's Mamba projection, DeepSeek-V4-Flash's head."""
ROWS = (1, 32, 256, 4096)
CALLS, ROUNDS = 20, 5
Product = Callable[[Tensor, Tensor], Tensor]


def providers() -> dict[str, Product]:
    """Name -> x @ w.T of bfloat16."""
    from unified_models.ops.linear import narrow_triton

    found: dict[str, Product] = {"torch.mm": lambda x, w: torch.mm(x, w.t())}
    if narrow.deep_gemm_release() is not None:
        found["DeepGEMM"] = narrow.deep_product
    return found | {"Triton": narrow_triton.product}


def recorded(call: Callable[[], object]) -> Callable[[], object]:
    """CALLS of it, as one graph."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            call()
    replay: Callable[[], object] = graph.replay
    return replay


def microseconds(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Of one call of each: the median of rounds in which they take turns."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(ROUNDS):
        for name, call in calls.items():
            begin.record()
            call()
            end.record()
            torch.cuda.synchronize()
            taken[name].append(begin.elapsed_time(end) * 1e3 / CALLS)
    return {name: median(each) for name, each in taken.items()}


def measure(K: int, N: int, table: Table) -> bool:
    """Rows of a table for one weight; whether Triton's and DeepGEMM's bits do not depend on the rows, and agree."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(max(ROWS), K, generator=generator, device="cuda").bfloat16()
    w = torch.randn(N, K, generator=generator, device="cuda").bfloat16()
    found, ok = providers(), True
    exact = found["Triton"](x, w)
    for rows in ROWS:
        part = x[:rows]
        calls = {name: recorded(partial(f, part, w)) for name, f in found.items()}
        times = microseconds(calls)
        for name, product in found.items():
            whole = exact if name != "torch.mm" else product(x, w)
            told = bits([product(part, w).float()], [whole[:rows].float()])
            ok &= name == "torch.mm" or (told.compared > 0 and told.unequal == 0)
            ratio = times["torch.mm"] / times[name]
            cells = (f"{K} x {N}", str(rows), name, f"{times[name]:.1f}", f"{ratio:.2f}")
            table.add_row(*cells, f"{told.unequal} of {told.compared}")
    return ok


def main() -> int:
    """0; 1: bits that must be equal were not; 2: no GPU."""
    console = Console(width=110)
    if not torch.cuda.is_available():
        Console(stderr=True).print("this bench needs a GPU")
        return 2
    console.print(torch.cuda.get_device_name(), machine())
    table = Table(title=f"x @ w.T, bfloat16; median of {ROUNDS} rounds of {CALLS} calls in a graph")
    for header in (
        "K x N",
        "rows",
        "by",
        "microseconds",
        "torch.mm / it",
        "bits unequal to 4096 rows",
    ):
        table.add_column(header, justify="right")
    passed = [measure(K, N, table) for K, N in SHAPES]
    console.print(table)
    return 0 if all(passed) else 1


if __name__ == "__main__":
    sys.exit(main())
