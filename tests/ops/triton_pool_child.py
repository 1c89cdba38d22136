"""In Triton's interpreter, in a process of its own: windows, entries, their choice and latent attention over pages of
records, step by step, have the bits that they have in one pack. Prints how many values were compared. tests/gpu runs it
on a device."""

import os
from typing import Any

import torch
from torch import Tensor

from tests.ops.conftest import compare_bits
from tests.ops.steps import pieces
from unified_models.context import (
    FLOAT32_RECORD,
    Entries,
    LatentFP8,
    Pool,
    Rope,
    Rows,
    VectorFP8,
    paged,
)
from unified_models.context.memory import Memory, PackMemory
from unified_models.context.step import Step
from unified_models.formats import PlainRecord
from unified_models.ops import pages
from unified_models.ops.pages import Pages
from unified_models.ops.records_triton import write_records

H, D, J, INDEX, PICKS, KEEP, BOUND = 4, 128, 2, 32, 3, 18, 96
LENGTHS = (1, 5, 18, 41, 0)
STEPS = ((1, 3, 17, 20, 0), (0, 1, 1, 15, 0), (0, 1, 0, 6, 0))
"""New tokens of each sequence in each step; the last sequence is padding."""
TOKENS, PAGES, PADDED, EPS = 16, 64, 7, 1e-6
ROPE = {D: Rope(64, 10000.0), INDEX: Rope(8, 10000.0)}


class Paged:
    """Pages of each slot in any order, of bytes that are NaN in every format."""

    def __init__(self, slots: tuple[Any, ...]) -> None:
        self.table = torch.randperm(PAGES).int()[: 6 * len(LENGTHS)].view(-1, 6)
        size = {slot: TOKENS * self.row(slot) for slot in slots}
        self.kept = {s: torch.full((PAGES, n), 255, dtype=torch.uint8) for s, n in size.items()}

    @staticmethod
    def row(slot: Any) -> int:
        """Bytes: those of a record, in whole lanes."""
        return -(-slot.record.size(slot.dim) // 16) * 16

    def pages(self, slot: Any) -> tuple[Pages, ...]:
        kind = slot.record.dtype if isinstance(slot.record, PlainRecord) else torch.uint8
        per_page = TOKENS // slot.stride if isinstance(slot, Entries) else TOKENS
        values = self.kept[slot].view(kind)
        return (
            Pages(values, self.table, per_page, values.stride(0), self.row(slot) // kind.itemsize),
        )

    def keep(self, step: Step, slot: Any, *rows: Tensor) -> None:
        (to,), who = self.pages(slot), step.sequences
        if isinstance(slot.record, PlainRecord):
            pages.write(who, (to,), (torch.cat(rows, 1),))
        else:
            write_records(to, rows[0], slot.record, who.sequence_T, who.position_T, who.total_S)

    def keep_entries(self, slot: Any, entries: Tensor, sequence: Tensor, number: Tensor) -> None:
        (to,), total_S = self.pages(slot), torch.full((len(LENGTHS),), BOUND, dtype=torch.int32)
        write_records(to, entries, slot.record, sequence, number, total_S)


def slots(stride: int, exact: bool) -> tuple[Rows, Entries, Entries]:
    """The window, the entries and the index entries of an attention. exact: float32 records."""
    latent, vector = (FLOAT32_RECORD,) * 2 if exact else (LatentFP8(64), VectorFP8())
    shape: dict[str, Any] = {"stride": stride, "overlap": stride == 4}
    made = (
        Rows(D, keep=KEEP, record=latent),
        Entries(D, record=latent, **shape),
        Entries(INDEX, record=vector, **shape),
    )
    for name, slot in zip(("window", "entries", "index"), made, strict=True):
        slot.path = name
    return made


def layer(step: Step, memory: Any, of: tuple[Any, ...], x: list[Tensor]) -> tuple[Tensor, ...]:
    """Picks, and attention to them and to all entries; x: see `inputs`."""
    window, *both = of
    q, kv, index_q, weights, sinks, *rest = x
    pools = []
    for slot, (values, gate, norm) in zip(both, (rest[:3], rest[3:]), strict=True):
        kept = paged.compress(step, memory, values, gate, slot, norm, EPS, ROPE[slot.dim])
        pools.append(Pool(slot, kept, step.counts_T(slot.stride)))
    picks = paged.select(step, index_q, weights, pools[1], PICKS)
    outs = [
        paged.attend_latent(step, memory, q, kv, window, D**-0.5, sinks, pools[0], chosen)
        for chosen in (picks, None)
    ]
    return picks, *outs


def inputs(of: tuple[Any, ...], T: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, the index's and their weights, sinks; values, gates and norm of each kind of entries."""
    made = [torch.randn(T, H, D).to(dtype), torch.randn(T, D).to(dtype)]
    made += [torch.randn(T, J, INDEX).to(dtype), torch.randn(T, J), torch.randn(H)]
    for slot in of[1:]:
        made += [torch.randn(T, slot.channels), 2 * torch.randn(T, slot.channels)]
        made.append(1 + 0.2 * torch.randn(slot.dim))
    return made


def compare(stride: int, exact: bool) -> int:
    """The sequences in one pack, and in three steps in pages."""
    of, T = slots(stride, exact), sum(LENGTHS)
    x = inputs(of, T, torch.float32 if exact else torch.bfloat16)
    pack: Memory = PackMemory()
    whole = layer(Step.of(LENGTHS, device=torch.get_default_device()), pack, of, x)
    assert all(bool(out.isfinite().all()) for out in whole[1:]) and int((whole[0] >= 0).sum()) > T
    memory = Paged((*of, of[1].open, of[2].open))
    assert tuple(map(sum, zip(*STEPS, strict=True))) == LENGTHS
    got = [torch.zeros_like(out) for out in whole]
    for step, order, at, index in pieces(STEPS, PADDED, BOUND):
        table, memory.table = memory.table, memory.table[order].contiguous()
        part = layer(step, memory, of, [t[index] if len(t) == T else t for t in x])
        for to, out in zip(got, part, strict=True):
            to[at] = out[: len(at)]
        assert all(bool(out[len(at) :].eq(0).all()) for out in part[1:]), "padding"
        memory.table = table
    return compare_bits(got, whole, f"stride {stride}, {'float32' if exact else 'records'}")


def main() -> int:
    on_cpu = os.environ.get("TRITON_INTERPRET") == "1"
    if on_cpu:
        from triton.runtime import interpreter

        from tests.ops.triton_latent_child import exact_dot

        interpreter.InterpreterBuilder.create_dot = exact_dot
    torch.manual_seed(0)
    with torch.device("cpu" if on_cpu else "cuda"):
        count = compare(4, False) + compare(4, True) + compare(8, False)
    print(f"{count} values agree")
    return count


if __name__ == "__main__":
    main()
