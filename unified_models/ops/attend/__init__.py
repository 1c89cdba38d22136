"""Attention over a list of key and value rows for each token, query heads in groups that share a key head (GQA)."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from unified_models.autograd import apply
from unified_models.ops.attend import arithmetic, listed
from unified_models.ops.blocks import BLOCK
from unified_models.ops.operator import operator
from unified_models.ops.pages import FLAT, Pages, Sequences
from unified_models.ops.rerun import rerun

CODES = (torch.float8_e4m3fn, torch.uint8)


class _Attend(torch.autograd.Function):
    """One key head and its query heads."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_RD: Tensor, v_RD: Tensor, index_TN: Tensor, scale: float
    ) -> Tensor:
        ctx.save_for_backward(q_THD, k_RD, v_RD, index_TN)
        ctx.scale = scale
        return arithmetic.forward(q_THD, k_RD, v_RD, index_TN, None, scale).to(q_THD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, index = ctx.saved_tensors
        dq, dk, dv, _ = arithmetic.backward(grads[0].float(), q, k, v, index, None, ctx.scale)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


class _OverFlatRows(torch.autograd.Function):
    """The kernels on flat rows, forward and backward. values: of k and of v, or the one tensor that both lie in."""

    @staticmethod
    def forward(
        ctx: Any, k: Pages, v: Pages, who: Sequences, how: dict[str, Any],
        q_THD: Tensor, *values: Tensor,
    ) -> Tensor:  # fmt: skip
        from unified_models.ops.attend import triton

        lse_TH = torch.empty(q_THD.shape[:2], dtype=torch.float32, device=q_THD.device)
        pages = replace(k, values=values[0]), replace(v, values=values[-1])
        out: Tensor = triton.attend(q_THD, *pages, who, lse_TH=lse_TH, **how)
        ctx.save_for_backward(out, lse_TH, q_THD, *values)
        ctx.places = tuple(replace(page, values=page.values.new_empty(0)) for page in (k, v))
        ctx.who, ctx.how = who, {name: how[name] for name in ("scale", "keep", "groups")}
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from unified_models.ops.attend import backward_triton

        out, lse_TH, q_THD, *values = ctx.saved_tensors
        k, v = ctx.places
        pages = replace(k, values=values[0]), replace(v, values=values[-1])
        found = backward_triton.gradients(grads[0], q_THD, *pages, ctx.who, out, lse_TH, **ctx.how)
        return None, None, None, None, *found


@operator
def attend(
    q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, index_TN: Tensor, *, scale: float
) -> Tensor:
    """o_h = sum_n e^{s_hn - M} v_n / sum_n e^{s_hn - M}, s_hn = scale q_h . k_n, M = max_n s_hn, of key head h G / H.

    index_TN: rows of each token's list, N a multiple of 64, -1 = none; every list names at least one row. H is a
    multiple of G; ValueError otherwise. float32 throughout, rounded once to q's dtype. The sums run in blocks of 64
    list places, in list order (README.md).
    """
    if index_TN.shape[1] % BLOCK:
        raise ValueError(f"a list is a multiple of {BLOCK} places long, got {index_TN.shape[1]}")
    H, G = q_THD.shape[1], k_RGD.shape[1]
    if H % G:
        raise ValueError(f"{H} query heads do not divide over {G} key heads")
    return _heads(q_THD, k_RGD, v_RGD, index_TN, scale)


def _heads(q_THD: Tensor, k_RGD: Tensor, v_RGD: Tensor, index_TN: Tensor, scale: float) -> Tensor:
    H, G = q_THD.shape[1], k_RGD.shape[1]
    heads = q_THD.unflatten(1, (G, H // G))
    outs = [
        apply(_Attend, heads[:, g], k_RGD[:, g], v_RGD[:, g], index_TN, scale) for g in range(G)
    ]
    return torch.cat(outs, 1)


@operator
def attend_pages(
    q_THD: Tensor,
    k: Pages,
    v: Pages,
    who: Sequences,
    *,
    scale: float,
    keep: int | None,
    groups: int,
    most: int,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """`attend` where the rows lie in pages: token t reads rows max(0, p - keep + 1) .. p of its sequence, p being its
    position (keep None: 0 .. p). [T, H, D] in q's dtype; zeros for a token of padding.

    q: bfloat16 or float32. A row of k, and one of v, is `groups` heads of D values: bfloat16, float32, or e4m3 codes
    (uint8 too) with `scales`, float32 [] of k and of v: a value is float32(code) * scale, rounded to q's dtype. most:
    no sequence has more tokens after this step; it bounds memory and grid, and changes no bit. ValueError for heads
    that do not divide over groups, and for codes without scales or scales without codes.

    CUDA: the two kernels of triton.py, nothing waits for the device, float32 sums in blocks of 64 and splits of 1024
    absolute positions (README.md). Gradients go to q and to flat pages' values, no two of whose sequences share a row:
    in bfloat16, of heads up to 256 wide, by the kernels of backward_triton.py, else through the lists of `attend`.
    """
    H = q_THD.shape[1]
    if H % groups:
        raise ValueError(f"{H} query heads do not divide over {groups} key heads")
    if k.values.dtype != v.values.dtype:
        raise ValueError(f"keys are {k.values.dtype}, values {v.values.dtype}")
    if (k.per_page, k.page, k.row) != (v.per_page, v.page, v.row):
        raise ValueError(
            f"pages of {k.per_page} keys, and of {v.per_page} values, or other strides"
        )
    if (k.values.dtype in CODES) != (scales is not None):
        raise ValueError(f"{k.values.dtype} rows, {'without' if scales is None else 'with'} scales")
    how: dict[str, Any] = {"scale": scale, "keep": keep, "groups": groups, "most": most}
    if not q_THD.is_cuda:
        return _listed(q_THD, k, v, who, scales=scales, **how)
    from unified_models.ops.attend import triton

    if torch.is_grad_enabled() and (
        q_THD.requires_grad or k.values.requires_grad or v.values.requires_grad
    ):
        from unified_models.ops.attend import backward_triton

        if scales is None and k.per_page == FLAT and backward_triton.takes(q_THD, k.values):
            return apply(_OverFlatRows, k, v, who, how, q_THD, *_values(k, v))
        return _trained(q_THD, k, v, who, scales=scales, **how)
    return triton.attend(q_THD, k, v, who, scales=scales, **how)


def _values(k: Pages, v: Pages) -> tuple[Tensor, ...]:
    """Of both; one tensor where they lie in one, which then gets one gradient."""
    return (k.values,) if k.values is v.values else (k.values, v.values)


def _trained(q_THD: Tensor, k: Pages, v: Pages, who: Sequences, **how: Any) -> Tensor:
    """Flat rows: the kernels' values with the gradient of the lists."""
    from unified_models.ops.attend import triton

    assert k.per_page == v.per_page == FLAT, "gradients go to flat pages"

    def over(attention: Any) -> Any:
        def run(q_THD: Tensor, *values: Tensor) -> Tensor:
            pages = replace(k, values=values[0]), replace(v, values=values[-1])
            return attention(q_THD, *pages, who, **how)  # type: ignore[no-any-return]

        return run

    return rerun(over(triton.attend), over(_listed), q_THD, *_values(k, v))  # type: ignore[no-any-return]


def _listed(
    q_THD: Tensor,
    k: Pages,
    v: Pages,
    who: Sequences,
    *,
    scale: float,
    keep: int | None,
    groups: int,
    most: int,
    scales: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Through lists, which wait for the device: the number of tokens that have a sequence, and their rows."""
    T, D = len(q_THD), q_THD.shape[-1]
    count = int((who.sequence_T >= 0).sum())  # a count
    seen = replace(
        who, sequence_T=who.sequence_T[:count], position_T=who.position_T[:count].clamp_min(0)
    )
    k_RGD, base_S = listed.rows(k, who, keep, groups, D)
    v_RGD, v_base_S = listed.rows(v, who, keep, groups, D)
    assert torch.equal(base_S, v_base_S), "keys and values of a token lie in rows of one number"
    if scales is not None:
        k_RGD, v_RGD = (
            listed.dequantized(codes, one, q_THD.dtype)
            for codes, one in zip((k_RGD, v_RGD), scales, strict=True)
        )
    index_TN = listed.lists(seen, base_S, keep, most)
    out = _heads(q_THD[:count], k_RGD, v_RGD, index_TN, scale)
    return F.pad(out, (0, 0, 0, 0, 0, T - count))
