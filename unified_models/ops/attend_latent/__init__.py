"""Attention over a list of rows for each token; a row is key and value of every head; a sink in the denominator."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.autograd import apply
from unified_models.formats.records import LatentFP8
from unified_models.ops.attend import arithmetic
from unified_models.ops.attend_latent import listed
from unified_models.ops.blocks import BLOCK
from unified_models.ops.blocks import window as window_of
from unified_models.ops.operator import operator
from unified_models.ops.pages import FLAT, Pages, Sequences
from unified_models.ops.rerun import rerun


class _AttendLatent(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        rows_RD: Tensor,
        sinks_H: Tensor | None,
        index_TN: Tensor,
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q_THD, rows_RD, sinks_H, index_TN)
        ctx.scale = scale
        return arithmetic.forward(q_THD, rows_RD, rows_RD, index_TN, sinks_H, scale).to(q_THD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, rows, sinks, index = ctx.saved_tensors
        dq, dkeys, dvalues, dsinks = arithmetic.backward(
            grads[0].float(), q, rows, rows, index, sinks, ctx.scale
        )
        return dq.to(q.dtype), (dkeys + dvalues).to(rows.dtype), dsinks, None, None


class _OverFlatRows(torch.autograd.Function):
    """The kernels on flat rows, forward and backward. `values`: of the window, and of the pool or None."""

    @staticmethod
    def forward(
        ctx: Any, window: Pages, pool: Pages | None, who: Sequences, how: dict[str, Any],
        q_THD: Tensor, window_RD: Tensor, pool_RD: Tensor | None, sinks_H: Tensor | None,
    ) -> Tensor:  # fmt: skip
        from unified_models.ops.attend_latent import triton

        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        there = _with_values(window, pool, window_RD, pool_RD)
        out: Tensor = triton.attend_latent(
            q_THD, there[0], who, pool=there[1], sinks_H=sinks_H, lse_TH=lse_TH, rope=0, **how
        )
        ctx.save_for_backward(out, lse_TH, q_THD, window_RD, pool_RD, sinks_H)
        nothing = window_RD.new_empty(0)
        ctx.places = _with_values(window, pool, nothing, nothing)
        ctx.who, ctx.how = who, how
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from unified_models.ops.attend_latent import backward_triton

        out, lse_TH, q_THD, window_RD, pool_RD, sinks_H = ctx.saved_tensors
        window, pool = ctx.places
        window, pool = _with_values(window, pool, window_RD, pool_RD)
        found = backward_triton.gradients(
            grads[0], q_THD, window, ctx.who, out, lse_TH, pool=pool, sinks_H=sinks_H, **ctx.how
        )
        return None, None, None, None, *found


def _with_values(
    window: Pages, pool: Pages | None, window_RD: Tensor, pool_RD: Tensor | None
) -> tuple[Pages, Pages | None]:
    there = None if pool is None or pool_RD is None else replace(pool, values=pool_RD)
    return replace(window, values=window_RD), there


@operator
def attend_latent(
    q_THD: Tensor, rows_RD: Tensor, index_TN: Tensor, *, scale: float, sinks_H: Tensor | None = None
) -> Tensor:
    """o_h = sum_n e^{s_hn - M} row_n / (sum_n e^{s_hn - M} + e^{sink_h - M}), s_hn = scale q_h . row_n, M = max_n s_hn.

    index_TN: rows of each token's list, N a multiple of 64, -1 = none; every list names at least one row. sinks_H:
    float32; e^{sink - M} may be inf, then the output is 0. float32 throughout, rounded once to q's dtype. The sums
    run in blocks of 64 list places, in list order (README.md).
    """
    if index_TN.shape[1] % BLOCK:
        raise ValueError(f"a list is a multiple of {BLOCK} places long, got {index_TN.shape[1]}")
    return apply(_AttendLatent, q_THD, rows_RD, sinks_H, index_TN, scale)


@operator
def attend_latent_pages(
    q_THD: Tensor,
    window: Pages,
    who: Sequences,
    *,
    scale: float,
    keep: int,
    sinks_H: Tensor | None = None,
    pool: Pages | None = None,
    count_T: Tensor | None = None,
    picks_TK: Tensor | None = None,
    most_entries: int = 0,
    record: str = "plain",
    rope: int = 64,
) -> Tensor:
    """`attend_latent` where the rows lie in pages: a token at position p of its sequence reads rows of the pool first,
    then rows max(0, p - keep + 1) .. p of the window. [T, H, D] in q's dtype; zeros for a token of padding.

    q: bfloat16 or float32. sinks_H: float32. Of the pool it reads its picks in their order (picks_TK: whole numbers,
    descending, -1 for none), or else entries 0 .. count_T[t] - 1, of which no token has more than most_entries; that
    bounds the grid, and changes no bit. record: "plain", rows of D values, bfloat16 or float32; or "latent_fp8", bytes
    of formats.LatentFP8 (uint8) whose last `rope` values are bfloat16, for bfloat16 q. ValueError for what does not
    go together.

    CUDA: the two kernels of triton.py, nothing waits for the device, float32 sums in blocks of 64 list places and
    splits of 512 (README.md). Gradients go to q, sinks and flat pages' plain values: in bfloat16, of rows up to 512
    wide, by the kernels of backward_triton.py, else through the lists of `attend_latent`.
    """
    _check(q_THD, window, pool, count_T, picks_TK, record, rope)
    how: dict[str, Any] = {
        "scale": scale, "keep": keep, "count_T": count_T, "picks_TK": picks_TK,
        "most_entries": most_entries, "rope": rope if record == "latent_fp8" else 0,
    }  # fmt: skip
    tensors = (q_THD, window.values, None if pool is None else pool.values, sinks_H)
    if q_THD.is_cuda:
        asked = any(x is not None and x.requires_grad for x in tensors)
        if torch.is_grad_enabled() and asked:
            return _trained(tensors, window, pool, who, how)
        from unified_models.ops.attend_latent import triton

        return triton.attend_latent(q_THD, window, who, sinks_H=sinks_H, pool=pool, **how)
    return _listed(q_THD, window, who, sinks_H=sinks_H, pool=pool, **how)


def _check(
    q_THD: Tensor,
    window: Pages,
    pool: Pages | None,
    count_T: Tensor | None,
    picks_TK: Tensor | None,
    record: str,
    rope: int,
) -> None:
    dtype, D = window.values.dtype, q_THD.shape[2]
    if record not in ("plain", "latent_fp8"):
        raise ValueError(f"rows are 'plain' or 'latent_fp8', not {record!r}")
    if (dtype == torch.uint8) != (record == "latent_fp8"):
        raise ValueError(f"{record} rows are not of dtype {dtype}")
    if record == "latent_fp8":
        if q_THD.dtype != torch.bfloat16:
            raise ValueError(f"latent_fp8 rows are read in bfloat16, and q is {q_THD.dtype}")
        LatentFP8(rope).size(D)  # a ValueError if D is none of its
        if not 0 < rope <= LatentFP8(rope).block:
            raise ValueError(f"latent_fp8 rows are read with a rope of 1 to 64, not {rope}")
    if pool is not None:
        if pool.values.dtype != dtype:
            raise ValueError(f"the window's rows are {dtype}, the pool's {pool.values.dtype}")
        if count_T is None and picks_TK is None:
            raise ValueError("a pool needs counts of visible entries or picks")


def _trained(
    tensors: tuple[Tensor | None, ...],
    window: Pages,
    pool: Pages | None,
    who: Sequences,
    how: dict[str, Any],
) -> Tensor:
    """Flat rows: the kernels' values with the gradient of other kernels, or of the lists."""
    from unified_models.ops.attend_latent import backward_triton

    flat = all(pages is None or pages.per_page == FLAT for pages in (window, pool))
    assert flat and not how["rope"], "gradients go to flat pages of plain rows"
    if tensors[0] is not None and backward_triton.takes(tensors[0], window.values):
        rest = {name: value for name, value in how.items() if name != "rope"}
        return apply(_OverFlatRows, window, pool, who, rest, *tensors)
    return _rerun(tensors, window, pool, who, how)


def _rerun(
    tensors: tuple[Tensor | None, ...],
    window: Pages,
    pool: Pages | None,
    who: Sequences,
    how: dict[str, Any],
) -> Tensor:
    """The kernels' values with the gradient of the lists."""
    from unified_models.ops.attend_latent import triton

    def over(attention: Any) -> Any:
        def run(q_THD: Tensor, window_RD: Tensor, pool_RD: Any, sinks_H: Tensor | None) -> Tensor:
            recent, there = _with_values(window, pool, window_RD, pool_RD)
            return attention(q_THD, recent, who, sinks_H=sinks_H, pool=there, **how)  # type: ignore[no-any-return]

        return run

    return rerun(over(triton.attend_latent), over(_listed), *tensors)  # type: ignore[no-any-return]


def _listed(
    q_THD: Tensor,
    window: Pages,
    who: Sequences,
    *,
    scale: float,
    keep: int,
    sinks_H: Tensor | None,
    pool: Pages | None,
    count_T: Tensor | None,
    picks_TK: Tensor | None,
    most_entries: int,
    rope: int,
) -> Tensor:
    """Through lists, which wait for the device: the number of tokens that have a sequence, and their rows."""
    T, D = len(q_THD), q_THD.shape[2]
    count, record = int((who.sequence_T >= 0).sum()), LatentFP8(rope) if rope else None  # a count
    seen = replace(who, sequence_T=who.sequence_T[:count], position_T=who.position_T[:count])
    rows_RD, index_TN = listed.rows(window, seen, window_of(seen.position_T, keep, 0), D, record)
    if pool is not None:
        picks_TK = None if picks_TK is None else picks_TK[:count]
        count_T = None if count_T is None else count_T[:count]
        lists_TN = listed.pool_lists(count_T, picks_TK, most_entries)
        pool_RD, pool_TN = listed.rows(pool, seen, lists_TN, D, record)
        index_TN = torch.where(index_TN < 0, -1, index_TN + len(pool_RD))
        index_TN = torch.cat((pool_TN, index_TN), 1)
        rows_RD = torch.cat((pool_RD, rows_RD))
    out = apply(_AttendLatent, q_THD[:count], rows_RD, sinks_H, index_TN, scale)
    return F.pad(out, (0, 0, 0, 0, 0, T - count))
