"""The trainer of the RL recipe over several processes: it tells each what to do, and computes the loss of all."""

from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from unified_models.adapters.fsdp.member import Member
from unified_models.rl.config import Config
from unified_models.rl.trainer import Loss, Sequences, StepResult, in_parts

SHARDS = "shards"
"""The folder of a checkpoint that torch.distributed.checkpoint writes."""


class ShardedTrainer:
    """`rl.trainer.Trainer` over config.train.processes processes (FSDP2), which `close` ends.

    Each process runs the forward and the backward of its sequences. The loss is computed here, from the logprobs of all
    and with one gradient for each, so that a comparison with the rollout stops a step before any process goes backward.

    folder: of the run. RuntimeError, from any method: a process failed; all of them are ended then.
    """

    def __init__(self, config: Config, folder: Path) -> None:
        train = config.train
        self.version, self.micro_batch = 0, train.micro_batch
        self.packs = train.processes // train.tokens  # processes that have sequences of their own
        self.same = train.tokens
        # Held here, so that no other process of the machine takes its port in between.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(train.processes):
            ours, theirs = context.Pipe()
            args = (rank, config, folder, self._store.port, theirs)
            process = context.Process(target=serve, args=args, daemon=True)
            process.start()
            theirs.close()  # so that its end is seen here
            self._pipes.append(ours)
            self._processes.append(process)
        self._answers()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()

    def _ask(self, method: str, *args: Any) -> list[Any]:
        """Every process does the same; what each answered."""
        return self._ask_each(method, [args] * len(self._pipes))

    def _ask_each(self, method: str, args: Sequence[tuple[Any, ...]]) -> list[Any]:
        for rank, (pipe, own) in enumerate(zip(self._pipes, args, strict=True)):
            try:
                pipe.send((method, own))
            except OSError:
                self._fail(rank, "ended")
        return self._answers()

    def _answers(self) -> list[Any]:
        """The next answer of each process, in any order: the first that failed leaves the others waiting."""
        answers: dict[int, Any] = {}
        ranks = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while len(answers) < len(ranks):
            for pipe in wait([p for p, rank in ranks.items() if rank not in answers]):
                assert isinstance(pipe, Connection)
                rank = ranks[pipe]
                try:
                    well, answer = pipe.recv()
                except EOFError:
                    self._fail(rank, "ended")
                if not well:
                    self._fail(rank, f"failed: {answer}")
                answers[rank] = answer
        return [answers[rank] for rank in range(len(ranks))]

    def _fail(self, rank: int, what: str) -> None:
        self.close()
        raise RuntimeError(f"training process {rank} of {len(self._pipes)} {what}")

    def _forward(
        self, sequences: Sequences, places: range, temperature: float, training: bool
    ) -> list[Tensor]:
        """Each process has every `packs`-th of the sequences; those that share a pack have the same."""
        mine = [[sequences[i] for i in places[at :: self.packs]] for at in range(self.packs)]
        args = [(own, temperature, training) for own in mine for _ in range(self.same)]
        answers = self._ask_each("forward", args)[:: self.same]
        lps: list[Any] = [None] * len(places)
        for at, answer in enumerate(answers):
            lps[at :: self.packs] = map(torch.from_numpy, answer)
        return lps

    def logprobs(self, sequences: Sequences, temperature: float) -> list[Tensor]:
        """See Trainer."""
        parts = in_parts(len(sequences), self.micro_batch)
        return [lp for at in parts for lp in self._forward(sequences, at, temperature, False)]

    def step(self, sequences: Sequences, temperature: float, loss: Loss) -> StepResult:
        """See Trainer."""
        total = 0.0
        for places in in_parts(len(sequences), self.micro_batch):
            lps = self._forward(sequences, places, temperature, True)
            for lp in lps:
                lp.requires_grad_()
            try:
                part = loss(lps, places)
            except ValueError:
                self._ask("forget")
                raise
            grads = torch.autograd.grad(part, lps, allow_unused=True, materialize_grads=True)
            arrays = [[g.numpy() for g in grads[at :: self.packs]] for at in range(self.packs)]
            self._ask_each("backward", [(own,) for own in arrays for _ in range(self.same)])
            total += float(part.detach())
        norm = self._ask("step")[0]
        self.version += 1
        return StepResult(total, norm)

    def restart(self, lr: float, weight_decay: float = 0.0) -> None:
        """See Trainer."""
        self._ask("restart", lr, weight_decay)

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """See Trainer. One tensor at a time, from the first process."""
        for pipe in self._pipes:
            pipe.send(("tensors", ()))
        items = iter(lambda: self._answers()[0], None)
        try:
            for name, array in items:
                yield name, torch.from_numpy(array)
        finally:
            for _ in items:  # what nobody asked for must not be taken for the next answer
                pass

    def save(self, folder: Path) -> None:
        """See Trainer: shards, which any other number of processes reads."""
        self._ask("save", str(folder / SHARDS))

    def load(self, folder: Path, version: int) -> None:
        """See Trainer."""
        if not (folder / SHARDS).is_dir():
            raise ValueError(
                f"{folder}: saved by a trainer in one process; go on with train.processes = 1"
            )
        self._ask("load", str(folder / SHARDS))
        self.version = version


def serve(rank: int, config: Config, folder: Path, port: int, pipe: Connection) -> None:
    """A training process: does what comes through the pipe, and answers (well, result), until its other end is gone."""
    torch.set_num_threads(config.threads)
    store = TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=config.train.processes)
    try:
        member = Member(config, folder)
        pipe.send((True, None))
        while True:
            method, args = pipe.recv()
            if method == "tensors":
                for item in member.tensors():
                    pipe.send((True, item if rank == 0 else ()))
            pipe.send((True, None if method == "tensors" else getattr(member, method)(*args)))
    except EOFError:
        return
    except (OSError, RuntimeError, ValueError) as error:
        pipe.send((False, f"{type(error).__name__}: {error}"))
