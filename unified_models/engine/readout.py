"""What is read from the hidden rows of a step: tokens to be sampled, and logprobs of sampled and given tokens."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import torch
from torch import Tensor

from unified_models.engine.draw import choose
from unified_models.engine.scheduler import Work
from unified_models.ops.logprob import logprobs

CHUNK_ELEMENTS = 1 << 22  # float32 logits at a time: 16 MiB
TILE = 16  # rows of a GEMM tile


@dataclass
class Readout:
    """The rows that a step asks for, in the order of its work. given: a token id, or -1 where one is sampled."""

    rows: list[int] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    keys: list[int | None] = field(default_factory=list)
    temperatures: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, work: list[Work]) -> "Readout":
        out = cls()
        row = 0
        for item in work:
            request, asked = item.request, item.asked
            out.rows += [row + position - item.start for position in asked]
            out.temperatures += [request.temperature] * len(asked)
            if request.sampling is None:
                out.given += [request.tokens[position + 1] for position in asked]
                out.keys += [None] * len(asked)
            elif asked:
                out.given.append(-1)
                out.keys.append(request.key())
            row += item.end - item.start
        return out

    def read(
        self, hidden_TM: Tensor, logits: Callable[[Tensor], Tensor], vocab_size: int
    ) -> tuple[list[int], list[float], float]:
        """Token ids and float32 logprobs of the rows, and the seconds that `logits` and logprobs took. Memory is
        bounded by chunks of rows."""
        ids: list[int] = []
        values: list[float] = []
        seconds = 0.0
        size = max(TILE, CHUNK_ELEMENTS // vocab_size // TILE * TILE)
        device = hidden_TM.device
        for at in range(0, len(self.rows), size):
            part = slice(at, at + size)
            rows_N = torch.tensor(self.rows[part], device=device)
            given_N = torch.tensor(self.given[part], device=device)
            temperature_N = torch.tensor(
                self.temperatures[part], dtype=torch.float32, device=device
            )
            began = perf_counter()
            logits_NV = logits(hidden_TM[rows_N])
            seconds += perf_counter() - began
            ids_N = self._tokens(logits_NV, given_N, temperature_N, part)
            began = perf_counter()
            values += logprobs(logits_NV, temperature_N, ids_N).tolist()
            seconds += perf_counter() - began
            ids += ids_N.tolist()
        return ids, values, seconds

    def _tokens(
        self, logits_NV: Tensor, given_N: Tensor, temperature_N: Tensor, part: slice
    ) -> Tensor:
        sampled_N = (given_N < 0).nonzero()[:, 0]
        if not len(sampled_N):
            return given_N
        keys = [k for k, token in zip(self.keys[part], self.given[part], strict=True) if token < 0]
        chosen = choose(logits_NV[sampled_N], temperature_N[sampled_N], keys)
        return given_N.index_copy(0, sampled_N, chosen)
