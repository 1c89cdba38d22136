"""Kernels of a decoding step on a GPU, at a model's own sizes: `python -m unified_models.bench.kernels [CONFIG]`.

Bits first: the last request alone against the same request among all. Then times under CUDA graphs, beside the time in
which a copy moves as many bytes.
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from unified_models.bench.conditions import machine
from unified_models.bench.products import CALLS, ROUNDS, microseconds, recorded
from unified_models.config import load_json
from unified_models.context.step import DeviceStep
from unified_models.models import nemotron_h
from unified_models.ops.pages import Pages
from unified_models.ops.scan.places import Places
from unified_models.ops.sort import by_expert
from unified_models.verify.compare import bits

CONFIG = "configs/nemotron_3_nano_30b.json"
REQUESTS = (1, 32, 256)
OPEN = 65
"""Tokens of each request in its open chunk."""


def experts(
    cfg: Any, requests: int, device: str = "cuda"
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], int]:
    """The up projection of all experts: of all requests, of the last alone, and the bytes that it moves."""
    from unified_models.ops.grouped_linear import triton as kernels

    E, K, M, F = (
        cfg.n_routed_experts,
        cfg.num_experts_per_tok,
        cfg.hidden_size,
        cfg.moe_intermediate_size,
    )
    w_EFM = (torch.randn(E, F, M, device=device) / M**0.5).bfloat16()
    ids_TK = torch.rand(requests, E, device=device).topk(K).indices
    x_TM = torch.randn(requests, M, device=device).bfloat16()

    def answers(x_TM: Tensor, ids_TK: Tensor) -> Tensor:
        order_P, place_TK, counts_E = by_expert(ids_TK, E)
        tiles = kernels.RowTiles(counts_E, ids_TK.numel())
        y_PF: Tensor = kernels.grouped_product(x_TM[order_P // K], w_EFM, tiles, dtype=x_TM.dtype)
        return y_PF[place_TK]

    moved = 2 * int(ids_TK.unique().numel()) * F * M
    return partial(answers, x_TM, ids_TK), partial(answers, x_TM[-1:], ids_TK[-1:]), moved


def scan(
    cfg: Any, requests: int, device: str = "cuda"
) -> tuple[Callable[[], Tensor], Callable[[], Tensor], int]:
    """One layer's scan of one token a request, in pages of a chunk."""
    from unified_models.ops.scan.triton import scan as kernel
    from unified_models.ops.scan.triton import tiles

    H, P, N, Q = cfg.mamba_num_heads, cfg.mamba_head_dim, cfg.ssm_state_size, cfg.chunk_size
    G, W = cfg.n_groups, H * P + cfg.n_groups * N
    made = torch.randn(2 * requests, Q, W, device=device).bfloat16()
    dt = torch.rand(2 * requests, Q, H, device=device) * 0.1
    states = torch.randn(2 * requests, H * P * N, device=device)
    c_TGN = torch.randn(requests, G, N, device=device).bfloat16()
    a_H, skip_H = -torch.rand(H, device=device) * 3, torch.randn(H, device=device)
    table = torch.arange(2 * requests, device=device, dtype=torch.int32).view(-1, 2)
    seen = states.bfloat16()

    def rows(table: Tensor, c_TGN: Tensor) -> Tensor:
        S = len(table)
        total = torch.full((S,), Q + OPEN, device=device, dtype=torch.int32)
        starts = torch.arange(S + 1, device=device, dtype=torch.int32)
        who = DeviceStep(starts, total, S, 2 * Q).sequences
        pages = (
            Pages(made, table, Q, Q * W, W),
            Pages(dt, table, Q, Q * H, H),
            Pages(made, table, Q, Q * W, W, start=H * P),
            *(Pages(kept, table, 1, H * P * N, 0) for kept in (states, seen)),
        )
        y: Tensor = kernel(
            Places(pages, (H, P, N), G, Q), c_TGN, a_H, skip_H, who, tiles(who, S, Q)
        )
        return y

    moved = requests * (2 * H * P * N + OPEN * (2 * W + 4 * H))
    return partial(rows, table, c_TGN), partial(rows, table[-1:], c_TGN[-1:]), moved


def copied() -> float:
    """Bytes a microsecond of a copy of 2 GiB: read and written."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    taken = microseconds({"copy": recorded(partial(target.copy_, source))})["copy"]
    return 2 * source.numel() / taken


def main(arguments: Sequence[str]) -> int:
    """0; 1: bits that must be equal were not; 2: no GPU."""
    console = Console(width=110)
    if not torch.cuda.is_available():
        Console(stderr=True).print("this bench needs a GPU")
        return 2
    file = Path(*arguments) if arguments else Path(CONFIG)
    cfg = nemotron_h.Config.from_json(load_json(file), str(file))
    console.print(torch.cuda.get_device_name(), machine(), str(file))
    table = Table(
        title=f"one layer, one token a request; median of {ROUNDS} rounds of {CALLS} calls in a graph"
    )
    for header in (
        "kernel",
        "requests",
        "microseconds",
        "bytes at a copy's speed",
        "bits unequal to alone",
    ):
        table.add_column(header, justify="right")
    speed, passed = copied(), True
    for make in (experts, scan):
        for requests in REQUESTS:
            whole, alone, moved = make(cfg, requests)
            told = bits([whole()[-1:].float()], [alone().float()])
            passed &= told.compared > 0 and not told.unequal
            taken = microseconds({"it": recorded(whole)})["it"]
            cells = (make.__name__, str(requests), f"{taken:.1f}", f"{moved / speed:.1f}")
            table.add_row(*cells, f"{told.unequal} of {told.compared}")
    console.print(table)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
