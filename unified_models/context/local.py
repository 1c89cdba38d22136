"""The context on one device, over ops: brings each operator its past and its experts, and does no maths of its own."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from unified_models.context import paged
from unified_models.context.interface import Experts, Pool
from unified_models.context.lists import (
    numbers,
    pool_lists,
    scan_grid,
    tap_rows,
    window_lists,
    window_rows,
)
from unified_models.context.memory import Memory, PackMemory, closed
from unified_models.context.slots import Entries, Rows, State
from unified_models.context.step import Step
from unified_models.formats import round_trip
from unified_models.ops import backend
from unified_models.ops.activation import relu2, swiglu
from unified_models.ops.attend import attend
from unified_models.ops.attend_latent import attend_latent
from unified_models.ops.choose import choose
from unified_models.ops.combine import combine_sorted, spread
from unified_models.ops.compress import compress
from unified_models.ops.conv import conv
from unified_models.ops.embed import embed
from unified_models.ops.grouped_linear import grouped_linear
from unified_models.ops.linear import linear
from unified_models.ops.operator import operator
from unified_models.ops.rope import Rope
from unified_models.ops.scan import scan
from unified_models.ops.select import select
from unified_models.ops.sort import by_expert
from unified_models.weight import Reading, Table, Version, Weight

Onlooker = Callable[[nn.Module, str, Any], None]


class LocalContext:
    """One step on one device; see interface.Context for each method.

    memory: what the sequences remember (None: a pack without past, which is training). onlooker: called with
    (site, name, value) for every note.
    """

    def __init__(
        self, step: Step, memory: Memory | None = None, onlooker: Onlooker | None = None
    ) -> None:
        backend.require(step.device)
        self.step, self.memory, self.onlooker = step, memory or PackMemory(), onlooker
        self._seen: dict[Weight, Version] = {}
        self._again = False

    @property
    def positions_T(self) -> Tensor:
        return self.step.positions_T

    def read(self, weight: Weight) -> Reading:
        """The weight as this step sees it; one step, and its recomputation in a backward, sees one version."""
        reading = weight()
        if self._seen.setdefault(weight, reading.version) != reading.version:
            raise RuntimeError(
                f"{weight.label}: the master changed within one step "
                f"(version {self._seen[weight]} first, {reading.version} now)"
            )
        return reading  # type: ignore[no-any-return]

    # a token and the weights

    @operator
    def embed(self, ids_T: Tensor, table: Weight) -> Tensor:
        check_ids(ids_T, table.shape[0], table.label)
        return embed(ids_T, self.read(table))

    @operator
    def lookup(self, ids_T: Tensor, table: Table) -> Tensor:
        check_ids(ids_T, table.shape[0], table.label)
        return table()[ids_T]  # type: ignore[no-any-return]

    @operator
    def linear(self, x: Tensor, *weights: Weight, dtype: torch.dtype | None = None) -> Any:
        outs = linear(x, *(self.read(w) for w in weights), dtype=dtype)
        return outs[0] if len(outs) == 1 else outs

    # a token and its past

    @operator
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
        if q_THD.is_cuda:
            read = None if scales is None else [self.read(w).dequantized() for w in scales]
            return paged.attend(self.step, self.memory, q_THD, k_TGD, v_TGD, slot, scale, read)
        kept = self.memory.rows(
            self.step, slot, torch.cat((k_TGD, v_TGD), 1).flatten(1), self._channels(k_TGD, scales)
        )
        k_RGD, v_RGD = kept.rows_RD.unflatten(1, (2, *k_TGD.shape[1:])).unbind(1)
        lists = window_lists(self.step, slot, kept.base_S)
        return attend(q_THD, k_RGD, v_RGD, lists, scale=scale)

    def _channels(self, k_TGD: Tensor, scales: tuple[Weight, Weight] | None) -> Tensor | None:
        """The scales of k and v, one a channel of their row."""
        if scales is None:
            return None
        read = [self.read(weight).dequantized() for weight in scales]
        return paged.channels(read, k_TGD.shape[1:].numel())

    @operator
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
        if q_THD.is_cuda:
            how = scale, sinks_H, pool, picks_TK
            return paged.attend_latent(self.step, self.memory, q_THD, kv_TD, slot, *how)
        recent = self.memory.rows(self.step, slot, kv_TD)
        lists = window_lists(self.step, slot, recent.base_S)
        rows = recent.rows_RD
        if pool is not None:
            entries_RD = pool.readable.rows_RD
            after_pool = torch.where(lists < 0, -1, lists + len(entries_RD))
            lists = torch.cat((pool_lists(self.step, pool, picks_TK), after_pool), 1)
            rows = torch.cat((entries_RD, rows))
        return attend_latent(q_THD, rows, lists, scale=scale, sinks_H=sinks_H)

    @operator
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
        step, norm_D = self.step, self.read(norm).value
        gate_TC = gate_TC + self.read(bias).value[step.places_T(slot.stride)]
        if kv_TC.is_cuda:
            how = norm_D, eps, rope
            kept = paged.compress(step, self.memory, kv_TC, gate_TC, slot, *how)
            return Pool(slot, kept, step.counts_T(slot.stride))
        inputs = self.memory.rows(step, slot.open, torch.cat((kv_TC, gate_TC), -1))
        first_S, counts_S = closed(step, slot)
        entries_UD = compress(
            inputs.rows_RD,
            window_rows(slot, first_S, counts_S, inputs.base_S),
            dim=slot.dim,
            norm=norm_D,
            eps=eps,
            positions_U=numbers(first_S, counts_S) * slot.stride,
            rope_=rope,
        )
        return Pool(slot, self.memory.entries(step, slot, entries_UD), step.counts_T(slot.stride))

    @operator
    def select(
        self, q_TJI: Tensor, weights_TJ: Tensor, pool: Pool, k: int, site: nn.Module
    ) -> Tensor:
        q_TJI, weights_TJ = q_TJI.detach(), weights_TJ.detach().float()
        if q_TJI.is_cuda:
            picks_TK = paged.select(self.step, q_TJI, weights_TJ, pool, k)
        else:
            picks_TK = select(*selected(self.step, q_TJI, weights_TJ, pool), k)
        self.note(site, "select", lambda: (*selected(self.step, q_TJI, weights_TJ, pool), picks_TK))
        return picks_TK

    @operator
    def conv(self, x_TC: Tensor, taps: Weight, bias: Weight | None, slot: Rows) -> Tensor:
        taps_CK = self.read(taps).value.flatten(1)
        bias_C = None if bias is None else self.read(bias).value
        if x_TC.is_cuda:
            return paged.conv(self.step, self.memory, x_TC, taps_CK, bias_C, slot)
        kept = self.memory.rows(self.step, slot, x_TC)
        return conv(kept.rows_RD, tap_rows(self.step, slot, kept.base_S), taps_CK, bias_C)

    @operator
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
        if x_THP.is_cuda:
            heads = a_H, skip_H
            return paged.scan(self.step, self.memory, x_THP, dt_TH, b_TGN, c_TGN, slot, *heads)
        x_RHP, dt_RH, b_RGN, base_S = paged.open_rows(
            self.step, self.memory, x_THP, dt_TH, b_TGN, slot
        )
        states_SHPN = self.memory.states(self.step, slot)
        grid = scan_grid(self.step, slot, base_S)
        y_THP, new_UHPN = scan(x_RHP, dt_RH, b_RGN, c_TGN, a_H, skip_H, states_SHPN, grid)
        self.memory.keep_states(self.step, slot, new_UHPN)
        return y_THP

    # a token and its experts

    @operator
    def choose(self, scores_TE: Tensor, k: int, site: nn.Module) -> Tensor:
        ids_TK = choose(scores_TE, k)
        self.note(site, "choose", lambda: (scores_TE.detach(), ids_TK))
        return ids_TK

    @operator
    def moe(self, x_TM: Tensor, ids_TK: Tensor, gates_TK: Tensor, experts: Experts) -> Tensor:
        order_P, place_TK, counts_E = by_expert(ids_TK, experts.num_experts)
        self.note(experts, "expert_rows", lambda: counts_E)
        y_PM = self._answers(spread(x_TM, order_P, place_TK), counts_E, experts)
        return combine_sorted(y_PM, place_TK, gates_TK, x_TM.dtype)

    def _answers(self, rows_PM: Tensor, counts_E: Tensor, experts: Experts) -> Tensor:
        """The experts' answers to rows sorted by expert; counts: rows of each."""
        hidden_PF = self._hidden(rows_PM, counts_E, experts)
        (y_PM,) = grouped_linear(hidden_PF, counts_E, self.read(experts.down))
        return y_PM

    def _hidden(self, rows_PM: Tensor, counts_E: Tensor, experts: Experts) -> Tensor:
        """The activations of rows sorted by expert."""
        if experts.gate is None:
            (up,) = grouped_linear(rows_PM, counts_E, self.read(experts.up))
            return relu2(up)
        gate, up = grouped_linear(rows_PM, counts_E, self.read(experts.gate), self.read(experts.up))
        return swiglu(gate, up, experts.limit)

    # an onlooker

    def note(self, site: nn.Module, name: str, value: Any) -> None:
        if self.onlooker is not None and not self._again:
            self.onlooker(site, name, value() if callable(value) else value)

    def again(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For torch.utils.checkpoint: around a forward, nothing; while it runs again, its notes are not shown twice."""
        return nullcontext(), _Again(self)


class _Again:
    """May be entered more than once: a graph that is kept runs backward several times."""

    def __init__(self, ctx: LocalContext) -> None:
        self.ctx = ctx

    def __enter__(self) -> None:
        self.ctx._again = True

    def __exit__(self, *_: object) -> None:
        self.ctx._again = False


def selected(
    step: Step, q_TJI: Tensor, weights_TJ: Tensor, pool: Pool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What `ops.select` is given: q after the round trip of the pool's record, weights, rows, and each token's."""
    q_TJI, kept = round_trip(q_TJI, pool.slot.record).float(), pool.readable
    base_T = kept.base_S[step.sequence_T]
    return q_TJI, weights_TJ, kept.rows_RD.detach().float(), base_T, pool.count_T


def check_ids(ids_T: Tensor, limit: int, label: str) -> None:
    """Refuse token ids outside [0, limit) with a ValueError that names the first. On a GPU, where it would have to be
    waited for, the lookup itself fails; engines and the training forward check what they are given before."""
    if ids_T.is_cuda:
        return
    bad = (ids_T < 0) | (ids_T >= limit)
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        raise ValueError(f"{label}: token id {int(ids_T[row])} in row {row} is not in [0, {limit})")
