"""The execution context: what a module may ask for when a token must meet something other than itself.

Weights that may be spread over devices, earlier tokens, experts, an onlooker. Everything else is a plain function of
one row (ops). No method is told the phase: a step is a pack of tokens, and each sequence has a past.

The contract, for every method: a token's result depends on its own sequence up to itself, and on nothing else - not
on its neighbours in the pack, nor on how its sequence was cut into steps. Bit for bit.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unified_models.context.slots import Entries, Rows, State
from unified_models.ops.rope import Rope
from unified_models.weight import Reading, Table, Weight


@dataclass(frozen=True)
class Pool:
    """The closed windows of each sequence, as `attend_latent` and `select` read them.

    rows_RD, base_S: as in memory.Readable. count_T: entries that token t sees; entry w is seen once its window
    closed at or before the token. int64.
    """

    slot: Entries
    rows_RD: Tensor
    base_S: Tensor
    count_T: Tensor


class Experts(nn.Module):
    """Gated experts: down(silu(clamp(gate x)) * clamp(up x)). Stacked weights [E, F, M], [E, F, M], [E, M, F]."""

    def __init__(
        self, num_experts: int, width: int, hidden: int, *, limit: float | None, format: str | None
    ) -> None:
        super().__init__()
        self.limit = limit
        self.gate = Weight("experts", num_experts, None, hidden, None, width, format=format)
        self.up = Weight("experts", num_experts, None, hidden, None, width, format=format)
        self.down = Weight("experts", num_experts, None, width, None, hidden, format=format)


class Context(Protocol):
    """One step of a model. See the module docstring for the contract."""

    @property
    def positions_T(self) -> Tensor:
        """The place of each token in its own sequence; int64."""

    # a token and the weights
    def embed(self, ids_T: Tensor, table: Weight) -> Tensor:
        """Rows of the table, in its format's activation dtype; ids are checked before anything runs."""

    def lookup(self, ids_T: Tensor, table: Table) -> Tensor:
        """Rows of a whole-number table; int64."""

    def linear(self, x: Tensor, *weights: Weight, dtype: torch.dtype | None = None) -> Any:
        """x @ w.T for each weight: one tensor for one weight, a tuple for several (which may be one GEMM).

        x is [T, K], or [T, groups, K] for a weight of groups. Accumulates in float32; returns the format's
        activation dtype, or `dtype`. An FP8 weight quantises x per token and 128 channels.
        """

    # a token and its past
    def attend_latent(
        self,
        q_THD: Tensor,
        kv_TD: Tensor,
        slot: Rows,
        *,
        scale: float,
        sinks_H: Tensor | None = None,
        pool: Pool | None = None,
        picks_TK: Tensor | None = None,
    ) -> Tensor:
        """One softmax over pool rows (all that are visible, or the picks) and the last `slot.keep` tokens; one row
        is key and value of every head. The sink enters the denominator only. Returns q's dtype, [T, H, D]."""

    def compress(
        self,
        kv_TC: Tensor,
        gate_TC: Tensor,
        slot: Entries,
        *,
        bias: Weight,
        norm: Weight,
        eps: float,
        rope: Rope,
    ) -> Pool:
        """One entry a window of `slot.stride` tokens: softmax of gate + bias over the window's tokens, channel by
        channel; weighted sum; RMSNorm; rope at the window's first position. float32 until it is stored."""

    def select(
        self, q_TJI: Tensor, weights_TJ: Tensor, pool: Pool, k: int, site: nn.Module
    ) -> Tensor:
        """picks_TK: the k entries with the highest sum_j weights[j] * relu(q[j] . entry), by the written rule of
        ops/select; -1 = none. q makes the round trip of the pool's record. No gradient."""

    def scan(
        self, x_THD: Tensor, dt_TH: Tensor, a_H: Tensor, b_TGN: Tensor, c_TGN: Tensor, slot: State
    ) -> Tensor:
        """Mamba-2's recurrence by replay of the open chunk."""

    # a token and its experts
    def choose(self, scores_TE: Tensor, k: int, site: nn.Module) -> Tensor:
        """ids_TK of the k highest scores by the written rule of ops/choose. The choice passes no gradient."""

    def moe(self, x_TM: Tensor, ids_TK: Tensor, gates_TK: Tensor, experts: Experts) -> Tensor:
        """sum_k gates[k] * expert[ids[k]](x), float32 in slot order, then rounded to x's dtype."""

    # an onlooker
    def note(self, site: nn.Module, name: str, value: Any) -> None:
        """Show a value to whoever looks; nothing happens otherwise. `value` may be a callable that makes it."""


__all__ = [
    "Context",
    "Entries",
    "Experts",
    "Pool",
    "Reading",
    "Rope",
    "Rows",
    "State",
    "Table",
    "Weight",
]
