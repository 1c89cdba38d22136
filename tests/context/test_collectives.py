"""Rows that move between four processes, against a dense statement that knows everyone's, in values and gradients."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.processes import run
from unified_models import verify
from unified_models.context.collectives import everyones, exchange, from_previous, gather, to_next

N = 4
WIDTH = 3
DTYPES = (torch.float32, torch.bfloat16)


class Case(NamedTuple):
    """send: rows of each process to each; counts: rows of each process."""

    seed: int
    dtype: torch.dtype
    send: list[list[int]]
    counts: list[int]


def cases() -> Iterator[Case]:
    """Uneven numbers of rows; processes that send, keep or get none; nothing at all; one row in all."""
    full = [[2, 0, 3, 1], [0, 0, 0, 0], [4, 0, 1, 0], [1, 0, 2, 5]]  # 1 neither sends nor gets
    one = [[0] * N for _ in range(N)]
    one[2][1] = 1
    random = Random(0)
    sends = [full, one, [[0] * N for _ in range(N)]]
    sends += [[[random.randrange(4) for _ in range(N)] for _ in range(N)] for _ in range(3)]
    counts = [[3, 0, 5, 1], [0, 0, 1, 0], [0, 0, 0, 0], [2, 2, 2, 2], [0, 7, 0, 1], [1, 2, 3, 4]]
    for seed, (send, count) in enumerate(zip(sends, counts, strict=True)):
        yield from (Case(seed, dtype, send, count) for dtype in DTYPES)


def rows(count: int, *key: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of very different sizes: sums of them depend on their order."""
    stream = Random(repr(key))
    values = [stream.uniform(-1, 1) * 10.0 ** stream.randrange(-3, 4) for _ in range(count * WIDTH)]
    return torch.tensor(values, dtype=dtype).view(count, WIDTH)


def moved(rank: int, case: Case) -> dict[str, Tensor]:
    """What this process gets of each collective, and the gradient of what it gave."""
    send, counts = case.send[rank], case.counts
    receive = [case.send[r][rank] for r in range(N)]
    got = {}

    def both(name: str, out: Tensor, x: Tensor) -> None:
        got[name] = out.detach()
        (got[f"{name}'s gradient"],) = torch.autograd.grad(
            out, x, rows(len(out), "cotangent", name, rank, case.seed, dtype=out.dtype)
        )

    x = rows(sum(send), "exchange", rank, case.seed, dtype=case.dtype).requires_grad_()
    both("exchange", exchange(x, send, receive, dist.group.WORLD), x)
    x = rows(counts[rank], "gather", rank, case.seed, dtype=case.dtype).requires_grad_()
    both("gather", gather(x, counts, dist.group.WORLD), x)
    x = rows(counts[rank], "everyones", rank, case.seed, dtype=case.dtype).requires_grad_()
    both("everyones", everyones(x, counts, dist.group.WORLD), x)
    ids = torch.arange(sum(send), dtype=torch.int64) + (rank << 40)
    got["ids"] = exchange(ids, send, receive, dist.group.WORLD)
    return got


def job(all_: Sequence[Case]) -> list[dict[str, Tensor]]:
    return [moved(dist.get_rank(), case) for case in all_]


def cut(x: Tensor, sizes: Sequence[int]) -> tuple[Tensor, ...]:
    return x.split(list(sizes))


def stated(rank: int, case: Case) -> dict[str, Tensor]:
    """The same, by slices of everyone's rows and cotangents."""
    receive = [[case.send[r][q] for r in range(N)] for q in range(N)]
    mine = slice(sum(case.counts[:rank]), sum(case.counts[: rank + 1]))

    def given(name: str, sizes: Sequence[int]) -> list[Tensor]:
        return [rows(n, name, r, case.seed, dtype=case.dtype) for r, n in enumerate(sizes)]

    def cotangents(name: str, sizes: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        return [rows(n, "cotangent", name, r, case.seed, dtype=dtype) for r, n in enumerate(sizes)]

    def swapped(parts: list[Tensor], sizes: list[list[int]]) -> Tensor:
        return torch.cat([cut(parts[r], sizes[r])[rank] for r in range(N)])

    sent, total = [sum(row) for row in case.send], [sum(case.counts)] * N
    want = {"exchange": swapped(given("exchange", sent), case.send)}
    dy = cotangents("exchange", [sum(row) for row in receive], case.dtype)
    want["exchange's gradient"] = swapped(dy, receive)
    want["gather"] = torch.cat(given("gather", case.counts)).float()
    total_dy = torch.zeros(case.counts[rank], WIDTH)
    for one in cotangents("gather", total, torch.float32):
        total_dy = total_dy + one[mine]
    want["gather's gradient"] = total_dy.to(case.dtype)
    want["everyones"] = torch.cat(given("everyones", case.counts))
    want["everyones's gradient"] = cotangents("everyones", total, case.dtype)[rank][mine]
    ids = [torch.arange(n, dtype=torch.int64) + (r << 40) for r, n in enumerate(sent)]
    want["ids"] = swapped(ids, case.send)
    return want


@pytest.mark.slow(20)
def test_rows_and_gradients_of_uneven_and_idle_processes(tmp_path: Path) -> None:
    """Every collective, float32 and bf16, 0 to 7 rows a process; bits, among them those of float32 sums in the order of
    processes. The control: another order of the same sum, or one in bf16, has other bits."""
    all_ = list(cases())
    answers = run(job, N, tmp_path, all_)
    compared: dict[str, int] = {}
    for rank, answer in enumerate(answers):
        for case, got in zip(all_, answer, strict=True):
            for name, want in stated(rank, case).items():
                same = verify.bits(got[name], want)
                assert same.unequal == 0, f"{name} of process {rank}, {case}: {same}"
                compared[name] = compared.get(name, 0) + same.compared
    assert len(compared) == 7 and min(compared.values()) > 100, compared
    terms = [rows(30, "order", r) for r in range(N)]
    forwards = ((terms[0] + terms[1]) + terms[2]) + terms[3]
    backwards = ((terms[3] + terms[2]) + terms[1]) + terms[0]
    assert verify.bits(forwards, backwards).unequal > 0
    low = sum((t.bfloat16() for t in terms[1:]), terms[0].bfloat16())
    assert verify.bits(forwards.bfloat16(), low).unequal > 0


def link(state: Tensor, gain: Tensor) -> tuple[Tensor, Tensor]:
    """One process's part of a chain: the next state, and what it makes of the one before. Whole numbers: exact."""
    return state * gain + 1, (state * state).sum(0)


def chain_job() -> dict[str, Any]:
    """The chain over all processes, without gradients and with."""
    rank, last, group = dist.get_rank(), dist.get_world_size() - 1, dist.group.WORLD
    gain = torch.full((2, 3), float(rank + 2), requires_grad=True)
    start = torch.arange(6.0).view(2, 3).requires_grad_()
    out: dict[str, Any] = {}
    for name, mode in (("values", torch.no_grad()), ("trained", torch.enable_grad())):
        with mode:
            like = torch.zeros(2, 3, requires_grad=torch.is_grad_enabled())
            state = from_previous(like, group) if rank else start * 1
            out[f"{name}: state"] = state.detach()
            state, y = link(state, gain)
            if rank < last:
                y = to_next(y, state, group)
            out[name] = y.detach()
            if torch.is_grad_enabled():
                y.backward(torch.full_like(y, rank + 1.0))
    out["grads"] = (gain.grad, start.grad)
    return out


@pytest.mark.slow(15)
def test_a_state_goes_from_process_to_process_and_its_gradient_back(tmp_path: Path) -> None:
    answers = run(chain_job, 3, tmp_path)
    state = start = torch.arange(6.0).view(2, 3).requires_grad_()
    gains = [torch.full((2, 3), float(r + 2), requires_grad=True) for r in range(3)]
    loss, states, ys = torch.zeros(()), [], []
    for r, gain in enumerate(gains):
        states.append(state.detach())
        state, y = link(state, gain)
        ys.append(y.detach())
        loss = loss + (y * (r + 1.0)).sum()
    loss.backward()
    for r, answer in enumerate(answers):
        for name in ("values", "trained"):
            assert torch.equal(answer[f"{name}: state"], states[r])
            assert torch.equal(answer[name], ys[r]) and bool((ys[r] != 0).all())
        # The last process's new state goes nowhere, and its gain has no gradient.
        mine, want = answer["grads"][0], gains[r].grad
        assert (mine is None) == (want is None) == (r == 2)
        assert r == 2 or (torch.equal(mine, want) and bool((want != 0).any()))
    assert torch.equal(answers[0]["grads"][1], start.grad)


def failing_job() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the one to be told")
    dist.barrier()


@pytest.mark.slow(15)
def test_a_process_that_fails_is_told_first(tmp_path: Path) -> None:
    """The harness itself: the fault, not the broken connections that follow from it."""
    with pytest.raises(AssertionError, match=r"^process 1 failed:\n(.*\n)+ValueError: the one to"):
        run(failing_job, 2, tmp_path, patience=60)
