"""Several gloo processes on this machine, each running one function of a test."""

import faulthandler
import os
import pickle
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PATIENCE = 300.0
"""Seconds after which processes that wait for each other are told to say where, and ended."""


def run(
    job: Callable[..., Any], processes: int, folder: Path, *args: Any, patience: float = PATIENCE
) -> list[Any]:
    """What `job(*args)` returned in each process, by rank; job: of a module. AssertionError: the first one that failed,
    with its traceback, or that they hung."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.pickle"):
        old.unlink()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = mp.spawn(
        _process, (job, processes, folder, port, args, patience), processes, join=False
    )
    for process in started.processes:
        process.join(patience + 30)
    alive = [p for p in started.processes if p.is_alive()]
    for process in alive:
        process.kill()
    told = [folder / f"rank{rank}.pickle" for rank in range(processes)]
    answers = [pickle.loads(file.read_bytes()) if file.exists() else None for file in told]
    for rank, answer in enumerate(answers):
        assert answer is None or answer[0], f"process {rank} failed:\n{answer[1]}"
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    assert not silent and not alive, f"processes {silent} did not answer within {patience} s"
    return [answer[1] for answer in answers]


def _process(
    rank: int,
    job: Callable[..., Any],
    processes: int,
    folder: Path,
    port: int,
    args: tuple[Any, ...],
    patience: float,
) -> None:
    faulthandler.dump_traceback_later(patience, exit=True)
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=processes)
    try:
        answer = (True, job(*args))
    except BaseException:  # the parent shows it
        answer = (False, traceback.format_exc())
    (folder / f"rank{rank}.pickle").write_bytes(pickle.dumps(answer))
    if answer[0]:
        dist.barrier()
        dist.destroy_process_group()
    else:
        os._exit(1)
