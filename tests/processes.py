"""Several processes on this machine, each running one function of a test: over gloo, and NCCL if there are GPUs for
all."""

import faulthandler
import os
import pickle
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 300.0
"""Seconds after which processes that wait for each other are told to say where, and ended."""
Partition = Sequence[Sequence[int]]
"""Ranks, cut into groups."""


def run(
    job: Callable[..., Any],
    processes: int,
    folder: Path,
    *args: Any,
    patience: float = PATIENCE,
    gpus: bool = False,
) -> list[Any]:
    """What `job(*args)` returned in each process, by rank; job: of a module. AssertionError: those that failed, with
    their tracebacks, the first to fail first; or that they hung. gpus: one for each, and NCCL between them."""
    folder.mkdir(parents=True, exist_ok=True)
    told = [folder / f"rank{rank}.pickle" for rank in range(processes)]
    for old in told:
        old.unlink(missing_ok=True)
    # Held here, so that no other process of the machine takes its port in between.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    args = (job, processes, folder, store.port, args, patience, gpus)
    started = mp.spawn(_process, args, processes, join=False)
    until = monotonic() + patience + 30
    for process in started.processes:
        process.join(max(until - monotonic(), 0))
    alive = [p for p in started.processes if p.is_alive()]
    for process in alive:
        process.kill()
    answers = {r: pickle.loads(file.read_bytes()) for r, file in enumerate(told) if file.exists()}
    failed = [(when, rank, what) for rank, (well, what, when) in answers.items() if not well]
    texts = [f"process {rank} failed:\n{what}" for _, rank, what in sorted(failed)]
    assert not texts, "\n".join(texts)
    silent = sorted(set(range(processes)) - set(answers))
    assert not silent and not alive, f"processes {silent} did not answer within {patience} s"
    return [answers[rank][1] for rank in range(processes)]


def group_in(partition: Partition) -> Any:
    """The group of this process in a partition of all of them, each of which must ask, in the same order; None for an
    empty partition."""
    mine = None
    for ranks in partition:
        group = dist.new_group(list(ranks))
        mine = group if dist.get_rank() in ranks else mine
    return mine


def _process(
    rank: int,
    job: Callable[..., Any],
    processes: int,
    folder: Path,
    port: int,
    args: tuple[Any, ...],
    patience: float,
    gpus: bool,
) -> None:
    faulthandler.enable()
    faulthandler.dump_traceback_later(patience, exit=True)
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    backend = "cpu:gloo,cuda:nccl" if gpus else "gloo"
    if gpus:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=processes)
    try:
        answer = (True, job(*args), monotonic())
    except BaseException:  # the parent shows it
        answer = (False, traceback.format_exc(), monotonic())
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(answer))
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(1)
