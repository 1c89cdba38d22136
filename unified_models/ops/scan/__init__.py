"""Mamba-2's selective scan by replay of the open chunk (Dao and Gu 2024, section 6: the chunked dual form)."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.ops.operator import operator
from unified_models.ops.products import bmm
from unified_models.ops.rounded import rounded
from unified_models.ops.scan.grid import TILE, Grid
from unified_models.ops.sums import running_sum
from unified_models.weight import Reading

__all__ = ["TILE", "Grid", "decay_rates", "scan"]


def decay_rates(log_H: Reading) -> Tensor:
    """a = -e^log [H], float32. Computed once for each version of a weight without a master, not in each step."""
    if log_H.master is None:
        return log_H.operand(_decay_rates)  # type: ignore[no-any-return]
    return -torch.exp(log_H.value)


def _decay_rates(log_H: Reading) -> Tensor:
    return -torch.exp(log_H.dequantized())


@operator
def scan(
    x_RHP: Tensor,
    dt_RH: Tensor,
    b_RGN: Tensor,
    c_TGN: Tensor,
    a_H: Tensor,
    skip_H: Tensor,
    states_SHPN: Tensor,
    grid: Grid,
) -> tuple[Tensor, Tensor]:
    """y_THP in c's dtype, and the float32 states after the chunks of `grid` that are full [., H, P, N].

    S_t = e^{dt_t a} S_{t-1} + dt_t x_t b_t^T; y_t = S_t c_t + skip x_t; head h reads group h G / H of b and c.
    x, dt, b: float32 rows of the open chunks, as the memory gives them; states: of each sequence before its first chunk
    of the step. c's dtype is that of the products' inputs: chunk states, decayed b and weights are rounded to it.

    A row is computed in a tile of 16 places from its chunk's boundary state and the chunk's rows so far, whatever else
    is in the step; a state moves when a chunk is full, from all of its rows at once. README.md has the order of sums.
    """
    dtype, P, N = c_TGN.dtype, x_RHP.shape[-1], b_RGN.shape[-1]
    chunks = Chunks.of(x_RHP, dt_RH, b_RGN, a_H, grid)
    starts_UHPN, states_FHPN = _pass_states(chunks, states_SHPN, grid, dtype)
    y_VHLP = _tiles(chunks, starts_UHPN, c_TGN.float(), skip_H, grid, dtype)
    y_NHP = y_VHLP.transpose(1, 2).flatten(0, 1)[grid.tokens_VL.flatten() >= 0]
    return y_NHP[..., :P].to(dtype), states_FHPN[..., :P, :N]


@dataclass(frozen=True)
class Chunks:
    """The rows of each chunk by head, zero where there is no token, P and N filled to whole lanes.

    decay: the running sum of dt * a over the chunk's places, where a place without a token adds nothing.
    """

    x_UHQP: Tensor
    dt_UHQ: Tensor
    decay_UHQ: Tensor
    b_UGQN: Tensor

    @classmethod
    def of(cls, x_RHP: Tensor, dt_RH: Tensor, b_RGN: Tensor, a_H: Tensor, grid: Grid) -> "Chunks":
        x, b = (gathered(_lanes(rows), grid.rows_UQ).transpose(1, 2) for rows in (x_RHP, b_RGN))
        dt = gathered(dt_RH.float(), grid.rows_UQ).transpose(1, 2).contiguous()
        decay = running_sum(dt * a_H[:, None])
        return cls(x.contiguous(), dt, decay, b.contiguous())

    def heads(self, of_groups: Tensor) -> Tensor:
        """[., G, ...] as [., H, ...]."""
        H, G = self.x_UHQP.shape[1], of_groups.shape[1]
        return of_groups.repeat_interleave(H // G, 1)


def gathered(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index], zeros at -1 whatever the memory holds."""
    rows = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, 1))
    found: Tensor = rows.index_select(0, index.flatten() % len(rows)).unflatten(0, index.shape)
    return found


def _lanes(x: Tensor) -> Tensor:
    return F.pad(x.float(), (0, -x.shape[-1] % TILE))


def _pass_states(
    chunks: Chunks, states_SHPN: Tensor, grid: Grid, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The state before each chunk, and after each full one: S' = e^{decay of the chunk} S + sum_j x_j b'_j^T with
    b'_j = b_j e^{decay after j} dt_j, rounded."""
    full = grid.full_U.nonzero().flatten()
    last_FH1 = chunks.decay_UHQ[full, :, -1:]
    left_FHQ = torch.exp((last_FH1 - chunks.decay_UHQ[full]).clamp(max=0)) * chunks.dt_UHQ[full]
    b_FHQN = rounded(chunks.heads(chunks.b_UGQN[full]) * left_FHQ[..., None], dtype)
    added_FHPN = products(chunks.x_UHQP[full].transpose(2, 3).contiguous(), b_FHQN)
    kept_FH = torch.exp(last_FH1)[..., None]

    P, N = added_FHPN.shape[-2:]
    state = F.pad(states_SHPN, (0, N - states_SHPN.shape[-1], 0, P - states_SHPN.shape[-2]))
    place_U = torch.empty_like(grid.sequence_U)
    place_U[full] = torch.arange(len(full), device=full.device)
    starts, ends, chunk_order, full_order = [], [], [], []
    for number in range(grid.depth):
        members = (grid.number_U == number).nonzero().flatten()
        starts.append(state[grid.sequence_U[members]])
        chunk_order.append(members)
        done = members[grid.full_U[members]]
        at, whose = place_U[done], grid.sequence_U[done]
        ends.append(kept_FH[at] * state[whose] + added_FHPN[at])
        full_order.append(at)
        state = state.index_copy(0, whose, ends[-1])
    if not starts:
        return state[:0], state[:0]
    return _in_order(starts, chunk_order), _in_order(ends, full_order)


def _in_order(parts: list[Tensor], order: list[Tensor]) -> Tensor:
    return torch.cat(parts)[torch.cat(order).argsort()]


def _tiles(
    chunks: Chunks,
    starts_UHPN: Tensor,
    c_TGN: Tensor,
    skip_H: Tensor,
    grid: Grid,
    dtype: torch.dtype,
) -> Tensor:
    """y of each tile's 16 places, float32 [V, H, 16, P']:
    e^{decay_i} c_i . S + sum_{j <= i} w_ij x_j + skip x_i with w_ij = (c_i . b_j) e^{decay_i - decay_j} dt_j, rounded.
    """
    u, t = grid.chunk_V, grid.tile_V
    c_VGLN = gathered(_lanes(c_TGN), grid.tokens_VL).transpose(1, 2).contiguous()
    x_VHQP, decay_VHQ = chunks.x_UHQP[u], chunks.decay_UHQ[u]
    Q = x_VHQP.shape[2]
    own_VHL = decay_VHQ.unflatten(-1, (-1, TILE))[torch.arange(len(u), device=u.device), :, t]

    apart_VHLQ = (own_VHL[..., None] - decay_VHQ[:, :, None]).clamp(max=0)
    places = torch.arange(Q, device=u.device)
    later_VLQ = places > (t[:, None] * TILE + places[:TILE])[..., None]
    cb_VGLQ = products(c_VGLN, chunks.b_UGQN[u].transpose(2, 3))
    w_VHLQ = chunks.heads(cb_VGLQ) * torch.exp(apart_VHLQ) * chunks.dt_UHQ[u][:, :, None]
    w_VHLQ = rounded(w_VHLQ.masked_fill(later_VLQ[:, None], 0.0), dtype)

    from_state = products(chunks.heads(c_VGLN), rounded(starts_UHPN, dtype)[u].transpose(2, 3))
    y_VHLP = torch.exp(own_VHL)[..., None] * from_state + (products(w_VHLQ, x_VHQP) + 0.0)
    x_VHLP = x_VHQP.unflatten(2, (-1, TILE))[torch.arange(len(u), device=u.device), :, t]
    out: Tensor = y_VHLP + skip_H[:, None, None] * x_VHLP
    return out


def products(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of stacks of matrices with whole lanes: one shape for all, so bits depend on no neighbour."""
    out: Tensor = bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
    return out
