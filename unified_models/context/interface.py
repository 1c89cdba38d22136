"""The execution context: what a module may ask for when a token must meet something other than itself.

Weights that may be spread over devices, earlier tokens, experts, an onlooker. Everything else is a plain function of
one row (ops). No method is told the phase: a step is a pack of tokens, and each sequence has a past.

The contract, for every method: a token's result depends on its own sequence up to itself, and on nothing else - not
on its neighbours in the pack, nor on how its sequence was cut into steps. Bit for bit.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from unified_models.context.memory import Readable
from unified_models.context.slots import Entries, Rows, State
from unified_models.ops.pages import Pages
from unified_models.ops.rope import Rope
from unified_models.weight import Reading, Table, Weight


@dataclass(frozen=True)
class Pool:
    """The closed windows of each sequence, as `attend_latent` and `select` read them.

    kept: their rows as they come back from the slot's record, or on a GPU where the records lie. count_T: entries that
    token t sees; entry w is seen once its window closed at or before the token. int64.
    """

    slot: Entries
    kept: Readable | Pages
    count_T: Tensor

    @property
    def readable(self) -> Readable:
        """AssertionError: they are read where they lie."""
        assert isinstance(self.kept, Readable), f"{self.slot.path}: its rows are not gathered"
        return self.kept

    @property
    def pages(self) -> Pages:
        """Where rows lie; those that were gathered as one page that never ends."""
        if isinstance(self.kept, Pages):
            return self.kept
        return Pages.flat(self.kept.rows_RD, self.kept.base_S)


class Experts(nn.Module):
    """E feed-forward networks. Stacked weights up [E, F, M], down [E, M, F] and, where the activation is gated, gate
    [E, F, M].

    activation: "swiglu" is down(silu(clamp(gate x)) * clamp(up x)), the gate clamped above at `limit`, up both ways;
    "relu2" is down(max(up x, 0)^2). format, formats: of all weights, or of each by its name.
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden: int,
        *,
        activation: str = "swiglu",
        limit: float | None = None,
        format: str | None = None,
        formats: Mapping[str, str | None] | None = None,
    ) -> None:
        super().__init__()
        assert activation in ("swiglu", "relu2"), f"unknown activation {activation!r}"
        self.activation, self.limit, self.num_experts = activation, limit, num_experts
        of = dict.fromkeys(("gate", "up", "down"), format) | dict(formats or {})

        def inner(name: str) -> Weight:
            return Weight("experts", num_experts, None, hidden, None, width, format=of[name])

        self.gate = inner("gate") if activation == "swiglu" else None
        self.up = inner("up")
        self.down = Weight("experts", num_experts, None, width, None, hidden, format=of["down"])


def cache_scale() -> Weight:
    """What keys or values are divided by before they are kept in FP8 (`attend(scales=)`), float32 [], never trained; 1
    where a checkpoint has none."""
    return Weight(format="float32", frozen=True, init="cache_scale", default=1.0, positive=True)


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
    def attend(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        slot: Rows,
        *,
        scale: float,
        scales: tuple[Weight, Weight] | None = None,
    ) -> Tensor:
        """Causal attention over the last `slot.keep` tokens; query heads in G groups share a key head. The slot holds
        k, then v (2 * G * D values); scales: of k and of v, for a record that has static ones. Returns q's dtype."""

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

    def conv(self, x_TC: Tensor, taps: Weight, bias: Weight | None, slot: Rows) -> Tensor:
        """A causal depthwise convolution: bias + sum_k taps[:, k] * x[t - K + 1 + k], float32 [T, C].

        taps: [C, 1, K]; the slot keeps K rows (a token's own among them)."""

    def scan(
        self,
        x_THP: Tensor,
        dt_TH: Tensor,
        b_TGN: Tensor,
        c_TGN: Tensor,
        slot: State,
        *,
        a_H: Tensor,
        skip_H: Tensor,
    ) -> Tensor:
        """Mamba-2: S_t = e^{dt_t a} S_{t-1} + dt_t x_t b_t^T, y_t = S_t c_t + skip x_t, by replay of the open chunk.

        dt: float32, positive; a: float32, negative; head h reads group h G / H of b and c. Returns c's dtype."""

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
    "cache_scale",
]
