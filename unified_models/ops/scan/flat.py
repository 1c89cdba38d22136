"""The scan of rows that lie one behind the other, as training has them: the kernels of both directions."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unified_models.autograd import apply
from unified_models.ops.pages import Pages, Sequences
from unified_models.ops.scan.places import Inputs, Places


@dataclass(frozen=True)
class Flat:
    """Row p of sequence s is row base_S[s] + p. table_SK: which row holds the state after chunk c of a sequence, int32:
    first the states before the step of the sequences old_S, then num_new others. tiles_V2: of `triton.tiles`. shape:
    H, P, N; groups: of b and c; chunk: Q."""

    base_S: Tensor
    table_SK: Tensor
    old_S: Tensor
    num_new: int
    who: Sequences
    tiles_V2: Tensor
    shape: tuple[int, int, int]
    groups: int
    chunk: int


class _Flat(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        flat: Flat,
        x_RHP: Tensor,
        dt_RH: Tensor,
        b_RGN: Tensor,
        c_TGN: Tensor,
        a_H: Tensor,
        skip_H: Tensor,
        states_SHPN: Tensor,
    ) -> tuple[Tensor, Tensor]:
        from unified_models.ops.scan.backward_triton import in_rows
        from unified_models.ops.scan.triton import scan

        x, dt, b, c = (in_rows(rows) for rows in (x_RHP, dt_RH, b_RGN, c_TGN))
        H, P, N = flat.shape
        old = len(flat.old_S)
        kept = states_SHPN.new_empty(old + flat.num_new, H * P * N)
        kept[:old] = states_SHPN[flat.old_S].flatten(1)
        seen = kept
        if c.dtype != kept.dtype:
            seen = torch.empty_like(kept, dtype=c.dtype)
            seen[:old] = kept[:old]
        pages = [Pages.flat(rows, flat.base_S) for rows in (x, dt, b)]
        pages += [Pages(rows, flat.table_SK, 1, rows.shape[1], 0) for rows in (kept, seen)]
        of = Places(tuple(pages), flat.shape, flat.groups, flat.chunk)
        y = scan(of, c, a_H, skip_H, flat.who, flat.tiles_V2)
        ctx.set_materialize_grads(False)
        ctx.flat = flat
        ctx.save_for_backward(x, dt, b, c, a_H, skip_H, seen)
        return y, kept[old:].unflatten(1, flat.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from unified_models.ops.scan.backward_triton import scan_backward

        flat: Flat = ctx.flat
        x, dt, b, c, a, skip, seen = ctx.saved_tensors
        places = flat.table_SK, flat.base_S.int().contiguous(), flat.who, flat.chunk
        of = Inputs(x, dt, b, c, a, skip, seen, *places)
        dy, given = (None if grad is None else grad.contiguous() for grad in grads)
        *found, before = scan_backward(of, dy, given, before=ctx.needs_input_grad[-1])
        return None, *found, before if ctx.needs_input_grad[-1] else None


def scan_flat(
    x_RHP: Tensor,
    dt_RH: Tensor,
    b_RGN: Tensor,
    c_TGN: Tensor,
    a_H: Tensor,
    skip_H: Tensor,
    states_SHPN: Tensor,
    flat: Flat,
) -> tuple[Tensor, Tensor]:
    """y_THP in c's dtype, and the float32 states after the chunks that fill up [., H, P, N]; as the operator `scan`,
    which runs without Triton. x and b: float32 or c's dtype, with values of c's dtype; states: float32."""
    args = (x_RHP, dt_RH, b_RGN, c_TGN, a_H, skip_H, states_SHPN)
    outs: Any = apply(_Flat, flat, *args)
    y_THP, states_FHPN = outs
    return y_THP, states_FHPN
