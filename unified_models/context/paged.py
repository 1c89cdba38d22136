"""Where tokens meet on a GPU: kernels that read a sequence's rows where they lie, in an engine's pages or in a pack.

A `PagedMemory` says where; what any other memory gathers is read as one page that never ends. Gradients are kernels'
too, or those of the lists of rows that the CPU reads.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from unified_models.context.interface import Pool
from unified_models.context.lists import numbers, tap_rows, window_rows
from unified_models.context.memory import Memory, PackMemory, PagedMemory, Readable, closed
from unified_models.context.slots import Entries, Rows, State
from unified_models.context.step import Step, starts
from unified_models.formats import LatentFP8, StaticFP8, VectorFP8, round_trip
from unified_models.formats.records import FLOAT32_RECORD, TailRecord
from unified_models.ops import compress as compress_op
from unified_models.ops import conv as conv_op
from unified_models.ops.attend import attend_pages
from unified_models.ops.attend_latent import attend_latent_pages
from unified_models.ops.compress import closing_windows
from unified_models.ops.conv.pack import conv_pack
from unified_models.ops.pages import Pages
from unified_models.ops.rerun import rerun
from unified_models.ops.rope import Rope
from unified_models.ops.scan.flat import Flat, scan_flat
from unified_models.ops.scan.places import Places
from unified_models.ops.select import select_pages


def channels(scales: Sequence[Tensor], each: int) -> Tensor:
    """The scales of k and v, one a channel of their row."""
    return torch.stack(list(scales)).repeat_interleave(each)


def attend(
    step: Step,
    memory: Memory,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    slot: Rows,
    scale: float,
    scales: Sequence[Tensor] | None,
) -> Tensor:
    """See `interface.Context`. Keys and values that come back in float32 from static FP8 are rounded to q's dtype."""
    G, each = k_TGD.shape[1], k_TGD.shape[1:].numel()
    of_channels = None if scales is None else channels(scales, each)
    if isinstance(memory, PagedMemory):
        rows = (k_TGD.flatten(1), v_TGD.flatten(1))
        (k,) = memory.pages(slot)
        v = dataclasses.replace(k, start=k.start + each)
        if isinstance(slot.record, StaticFP8):
            both = slot.record.encode(torch.cat(rows, 1), of_channels)
            rows = (both[:, :each], both[:, each:])
        memory.keep(step, slot, *rows)
    else:
        kept = memory.rows(step, slot, torch.cat((k_TGD, v_TGD), 1).flatten(1), of_channels)
        rows_RD = kept.rows_RD.to(q_THD.dtype)
        k, v = (Pages.flat(rows_RD, kept.base_S, start) for start in (0, each))
        scales = None
    return attend_pages(
        q_THD, k, v, step.sequences, scale=scale, keep=slot.keep, groups=G, most=step.most,
        scales=None if scales is None else (scales[0], scales[1]),
    )  # fmt: skip


def conv(
    step: Step,
    memory: Memory,
    x_TC: Tensor,
    taps_CK: Tensor,
    bias_C: Tensor | None,
    slot: Rows,
) -> Tensor:
    """See `interface.Context`."""
    from unified_models.ops.conv.triton import conv

    who = step.sequences
    if isinstance(memory, PagedMemory):
        (old,) = memory.pages(slot)
        y: Tensor = conv(x_TC, old, taps_CK, bias_C, who)
        memory.keep(step, slot, x_TC)
        return y
    kept = memory.rows(step, slot, x_TC)
    if isinstance(memory, PackMemory):
        return conv_pack(kept.rows_RD, taps_CK, bias_C, kept.base_S, who)
    all_old = dataclasses.replace(who, past_S=who.total_S)

    def kernel(rows_RC: Tensor, taps_CK: Tensor, bias_C: Tensor | None) -> Tensor:
        old = Pages.flat(rows_RC, kept.base_S)
        return conv(x_TC, old, taps_CK.contiguous(), bias_C, all_old)

    def meaning(rows_RC: Tensor, taps_CK: Tensor, bias_C: Tensor | None) -> Tensor:
        return conv_op.conv(rows_RC, tap_rows(step, slot, kept.base_S), taps_CK, bias_C)

    out: Tensor = rerun(kernel, meaning, kept.rows_RD, taps_CK, bias_C)
    return out


def scan(
    step: Step,
    memory: Memory,
    x_THP: Tensor,
    dt_TH: Tensor,
    b_TGN: Tensor,
    c_TGN: Tensor,
    slot: State,
    a_H: Tensor,
    skip_H: Tensor,
) -> Tensor:
    """See `interface.Context`."""
    from unified_models.ops.scan.triton import scan as kernel_of
    from unified_models.ops.scan.triton import tiles

    who = step.sequences
    tiles_V2 = step.once(("tiles", slot.chunk), lambda: tiles(who, len(x_THP), slot.chunk))
    sizes = slot.shape, slot.groups, slot.chunk
    if isinstance(memory, PagedMemory):
        memory.keep(step, slot, x_THP, dt_TH, b_TGN)
        of = Places(memory.pages(slot), *sizes)
        out: Tensor = kernel_of(of, c_TGN, a_H, skip_H, who, tiles_V2)
        return out
    x, dt, b, base_S = open_rows(step, memory, x_THP, dt_TH, b_TGN, slot)
    flat = Flat(base_S, *state_rows(step, slot), who, tiles_V2, *sizes)
    y, new = scan_flat(x, dt, b, c_TGN, a_H, skip_H, memory.states(step, slot), flat)
    memory.keep_states(step, slot, new)
    return y


def open_rows(
    step: Step, memory: Memory, x_THP: Tensor, dt_TH: Tensor, b_TGN: Tensor, slot: State
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, dt and b of the open chunks, old rows and new ones; and the base of each sequence in them."""
    record = slot.open.record
    if isinstance(memory, PackMemory) and x_THP.is_cuda:
        most = record.most if isinstance(record, TailRecord) else FLOAT32_RECORD
        return round_trip(x_THP, most), dt_TH, round_trip(b_TGN, most), step.starts_S[:-1]
    new_TD = torch.cat((x_THP.float().flatten(1), b_TGN.float().flatten(1), dt_TH), 1)
    kept = memory.rows(step, slot.open, new_TD)
    x_RD, b_RD, dt_RH = kept.rows_RD.split(slot.parts, 1)
    x_RHP, b_RGN = x_RD.unflatten(1, x_THP.shape[1:]), b_RD.unflatten(1, b_TGN.shape[1:])
    return x_RHP, dt_RH, b_RGN, kept.base_S


def state_rows(step: Step, slot: State) -> tuple[Tensor, Tensor, int]:
    """table_SK: which row holds the state after chunk c of a sequence, int32; old_S: the sequences whose last state
    comes first among the rows, in order; and how many new states come behind those."""

    def build() -> tuple[Tensor, Tensor, int]:
        Q = slot.chunk
        first_S, counts_S = closed(step, slot)
        old = [s for s, past in enumerate(step.past) if past >= Q]
        new = sum((p + n) // Q - p // Q for p, n in zip(step.past, step.lengths, strict=True))
        chunks = torch.arange(step.most // Q + 1, device=step.device)
        table_SK = (len(old) + starts(counts_S)[:-1] - first_S)[:, None] + chunks
        old_S = torch.tensor(old, dtype=torch.int64, device=step.device)
        table_SK[old_S, first_S[old_S] - 1] = torch.arange(len(old), device=step.device)
        return table_SK.int(), old_S, new

    found: tuple[Tensor, Tensor, int] = step.once(("states", slot.chunk), build)
    return found


def attend_latent(
    step: Step,
    memory: Memory,
    q_THD: Tensor,
    kv_TD: Tensor,
    slot: Rows,
    scale: float,
    sinks_H: Tensor | None,
    pool: Pool | None,
    picks_TK: Tensor | None,
) -> Tensor:
    """See `interface.Context`."""
    assert slot.keep is not None, f"{slot.path}: a window"
    how: dict[str, Any] = {}
    if isinstance(memory, PagedMemory):
        memory.keep(step, slot, kv_TD)
        (window,) = memory.pages(slot)
        if isinstance(slot.record, LatentFP8):
            how = {"record": "latent_fp8", "rope": slot.record.rope}
    else:
        recent = memory.rows(step, slot, kv_TD)
        window = Pages.flat(recent.rows_RD, recent.base_S)
    if pool is not None:
        how |= {"pool": pool.pages, "count_T": pool.count_T, "picks_TK": picks_TK}
        how["most_entries"] = step.most // pool.slot.stride
    return attend_latent_pages(
        q_THD, window, step.sequences, scale=scale, keep=slot.keep, sinks_H=sinks_H, **how
    )


def compress(
    step: Step,
    memory: Memory,
    kv_TC: Tensor,
    gate_TC: Tensor,
    slot: Entries,
    norm_D: Tensor,
    eps: float,
    rope: Rope,
) -> Readable | Pages:
    """What can be read of the slot after this step; see `interface.Context`. The gate has its bias."""
    who = step.sequences
    windows = step.once(
        ("closing", slot.stride), lambda: closing_windows(who, step.num_tokens, slot.stride)
    )
    if isinstance(memory, PagedMemory):
        # First: a prefix cache may give one sequence the rows of another in the step that makes them.
        memory.keep(step, slot.open, kv_TC, gate_TC)
        (rows,) = memory.pages(slot.open)
        entries_UD = compress_open(step, rows, windows, slot, norm_D, eps, rope)
        memory.keep_entries(slot, entries_UD, *windows)
        return memory.pages(slot)[0]
    kept = memory.rows(step, slot.open, torch.cat((kv_TC, gate_TC), -1))
    first_S, counts_S = closed(step, slot)
    count = sum(
        (past + new) // slot.stride - past // slot.stride
        for past, new in zip(step.past, step.lengths, strict=True)
    )

    def kernel(rows_RC: Tensor, norm_D: Tensor) -> Tensor:
        entries_UD = compress_open(
            step, Pages.flat(rows_RC, kept.base_S), windows, slot, norm_D, eps, rope
        )
        return entries_UD[:count]

    def meaning(rows_RC: Tensor, norm_D: Tensor) -> Tensor:
        index_UP = window_rows(slot, first_S, counts_S, kept.base_S)
        return compress_op.compress(
            rows_RC,
            index_UP,
            dim=slot.dim,
            norm=norm_D,
            eps=eps,
            positions_U=numbers(first_S, counts_S) * slot.stride,
            rope_=rope,
        )

    return memory.entries(step, slot, rerun(kernel, meaning, kept.rows_RD, norm_D))


def compress_open(
    step: Step,
    rows: Pages,
    windows: tuple[Tensor, Tensor],
    slot: Entries,
    norm_D: Tensor,
    eps: float,
    rope: Rope,
) -> Tensor:
    """The entries of `closing_windows`, all of whose tokens have their open row already."""
    from unified_models.ops.compress.triton import compress

    old = dataclasses.replace(step.sequences, past_S=step.sequences.total_S)
    nothing = norm_D.new_zeros(slot.stride, slot.channels, dtype=torch.float32)
    entries_UD: Tensor = compress(
        nothing, nothing, rows, old, *windows, stride=slot.stride, overlap=slot.overlap,
        dim=slot.dim, bias=nothing, norm=norm_D, eps=eps, rope_=rope,
    )  # fmt: skip
    return entries_UD


def select(step: Step, q_TJI: Tensor, weights_TJ: Tensor, pool: Pool, k: int) -> Tensor:
    """See `interface.Context`. What an FP8 record holds, bfloat16 does, too."""
    from unified_models.ops.records_triton import round_trip as through

    record, keys = pool.slot.record, pool.kept
    dtype = torch.bfloat16 if isinstance(record, VectorFP8) else torch.float32
    if isinstance(keys, Readable):
        keys = Pages.flat(keys.rows_RD.detach().to(dtype), keys.base_S)
    if isinstance(record, VectorFP8):
        q_TJI = through(q_TJI, record, dtype)
    most = step.most // pool.slot.stride
    return select_pages(q_TJI.to(dtype), weights_TJ, keys, step.sequences, pool.count_T, k, most)
