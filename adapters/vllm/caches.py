"""Our slots as vLLM's caches: layers of bytes, with pages that vLLM's own managers hand out.

What a layer keeps of near tokens lies in one page, slot after slot, and so do its compressed entries in another: vLLM's
host time grows with the kinds of pages, of which there are two. A State is a sliding window, too: its page covers one
chunk and holds the chunk's open rows and the state after the last of them, and a window of chunk + 1 tokens keeps the
page of the last boundary. So vLLM's prefix cache finds it by the rules of windows, at multiples of the chunk, and
nothing is copied. A convolution before the scan reads a few rows; its page is the scan's, too, of whose tokens it keeps
the last ones.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from unified_models.adapters.vllm.backend import Backend, Metadata
from unified_models.context.slots import Entries, Rows, Slot, State
from unified_models.formats.records import TailRecord

STRIDES = "tokens_per_state" in {field.name for field in dataclasses.fields(FullAttentionSpec)}
"""Whether a spec of this release may have a row for several tokens, and a page size of its own (0.27 and later)."""
SHORT = 16
"""Rows of at most so many tokens lie in the page of a State of their module, where there is one."""
ALIGNED = 16
"""bytes of which a page is a multiple, so that kernels may read any dtype in it"""
HEADER = 16  # bytes of a State's page: the position of its first row, and how many rows it has; int64 each


class Cache(nn.Module, AttentionLayerBase):  # type: ignore[misc]
    """Pages of slots that are kept alike, as vLLM allocates and binds them.

    tokens: of a page. keep: tokens that stay readable, None: all. short: of a State, the Rows that lie in its pages.
    """

    def __init__(
        self,
        name: str,
        slots: Sequence[Slot],
        *,
        tokens: int,
        keep: int | None,
        short: Sequence[Rows] = (),
    ) -> None:
        super().__init__()
        self.layer_name, self.slots, self.tokens, self.keep = name, tuple(slots), tokens, keep
        (self.stride,) = {stride_of(slot) for slot in slots}
        self.tail = 0
        self.short: dict[Slot, tuple[int, int]] = {}
        """where the rows of a slot begin in a page, and how many there are"""
        slot = self.slot
        if isinstance(slot, State):
            self.tail = 4 * slot.size + HEADER
            # A copy as rows of tokens see it, half as large: decoding reads nothing else.
            self.tail += 2 * slot.size if isinstance(slot.open.record, TailRecord) else 0
            for rows in short:
                assert rows.keep is not None, f"{rows.path}: a bounded number of rows"
                self.short[rows] = tokens * self.row + self.tail, rows.keep
                self.tail += rows.keep * rows.record.size(rows.dim)
        self.kv_cache = torch.empty(0)
        self.block_bytes: int | None = None

    @property
    def slot(self) -> Slot:
        """The first, after which the cache is called."""
        return self.slots[0]

    @property
    def row(self) -> int:
        """Bytes of a row of the first slot."""
        return row_of(self.slot)

    @property
    def rows_per_page(self) -> int:
        """Of each slot; `stride` tokens have one."""
        return self.tokens // self.stride

    def start(self, slot: Slot) -> int:
        """Where a slot's rows begin in a page, in bytes: behind those of the slots before it, on a whole lane."""
        if slot not in self.slots:  # the open rows of a State
            return 0
        before = self.slots[: self.slots.index(slot)]
        return sum(aligned(self.rows_per_page * row_of(other)) for other in before)

    @property
    def page_bytes(self) -> int:
        """What a page holds."""
        last = self.slots[-1]
        return self.start(last) + self.rows_per_page * row_of(last) + self.tail

    @property
    def padded_bytes(self) -> int:
        """The bytes of vLLM's page: as many for each of its rows."""
        return -(-aligned(self.page_bytes) // self.rows_per_page) * self.rows_per_page

    def get_attn_backend(self) -> type[Backend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """A page of bytes: one head whose content is the page's bytes, spread over its rows.

        vLLM 0.26 knows one page size for all of a model, and puts into one group what has one spec: there the content
        is the whole page's, spread over its tokens.
        """
        content = self.padded_bytes // self.rows_per_page
        if not STRIDES and self.block_bytes is not None:
            content = self.block_bytes // self.tokens
        fields: dict[str, Any] = {
            "block_size": self.tokens,
            "num_kv_heads": 1,
            "head_size": content,
            "head_size_v": 0,
            "dtype": torch.uint8,
            "dcp_sharded": False,
            "tokens_per_state": self.stride,
            "page_size_padded": self.block_bytes,
        }
        kind = FullAttentionSpec if self.keep is None else SlidingWindowSpec
        if self.keep is not None:
            fields["sliding_window"] = self.keep
        known = {field.name for field in dataclasses.fields(kind)}
        return kind(**{name: value for name, value in fields.items() if name in known})

    def bind_kv_cache(self, kv_cache: Tensor) -> None:
        self.kv_cache = kv_cache

    def spoil(self) -> None:
        """Nothing that is stored may be read any more: every byte is that of a NaN, in each format that a row has."""
        if self.kv_cache.numel():
            self.kv_cache.view(torch.uint8).fill_(0xFF)

    @property
    def pages_PB(self) -> Tensor:
        """The bytes of each page."""
        return self.kv_cache.flatten(1)

    @property
    def metadata(self) -> Metadata | None:
        """Of this step; None while vLLM measures memory, before there are caches."""
        known = get_forward_context().attn_metadata
        return known[self.layer_name] if known else None


def caches(slots: Iterable[Slot], page_tokens: int, prefix: str) -> Iterator[Cache]:
    """A cache for everything that a model keeps; page_tokens: vLLM's block size.

    ValueError: a page size that does not fit a slot.
    """
    for number, args in enumerate(kinds(slots, page_tokens)):
        yield Cache(f"{prefix}slots.{number}", **args)


def level(made: Sequence[Cache], *, prefixes: bool) -> None:
    """Give all caches one page size, that of the largest, where this release asks for it. Those that are kept for good
    fill it; where prefixes are to be found, and that is in whole pages, up to the tokens of another page."""
    if STRIDES:
        return
    largest = max(cache.padded_bytes for cache in made)
    most = max(cache.tokens for cache in made) if prefixes else math.inf
    for tokens in {cache.tokens for cache in made if cache.keep is None}:
        alike = [cache for cache in made if cache.keep is None and cache.tokens == tokens]
        while 2 * max(c.padded_bytes for c in alike) <= largest and 2 * alike[0].tokens <= most:
            for cache in alike:
                cache.tokens *= 2
    whole = math.lcm(ALIGNED, *(cache.tokens for cache in made))
    for cache in made:
        cache.block_bytes = -(-largest // whole) * whole


def kinds(slots: Iterable[Slot], page_tokens: int) -> Iterator[dict[str, Any]]:
    """The arguments of each cache that slots need."""
    slots = list(slots)
    states = {parent(slot): slot for slot in slots if isinstance(slot, State)}
    short: dict[Slot, list[Rows]] = {state: [] for state in states.values()}
    for slot in slots:
        state = states.get(parent(slot))
        few = isinstance(slot, Rows) and slot.keep is not None and slot.keep <= SHORT
        if isinstance(slot, Rows) and few and state is not None:
            short[state].append(slot)
    inside = {slot for of in short.values() for slot in of}
    strides = [slot.stride for slot in slots if isinstance(slot, Entries)]
    layers: dict[str, list[Slot]] = {}
    for slot in slots:
        if slot not in inside:
            layers.setdefault(layer(slot, slots), []).append(slot)
    for members in layers.values():
        for args in kinds_of(members, page_tokens, math.lcm(page_tokens, *strides)):
            yield args | {"short": short.get(args["slots"][0], ())}


def parent(slot: Slot) -> str:
    """The path of the module that has the slot."""
    return slot.path.rpartition(".")[0]


def layer(slot: Slot, slots: Iterable[Slot]) -> str:
    """The path of the outermost module that has a window and the slot somewhere within; else the slot's own."""
    windows = [parent(s) for s in slots if isinstance(s, Rows) and s.keep is not None]
    around = [path for path in windows if slot.path.startswith(f"{path}.")]
    return min(around, key=len) if around and not isinstance(slot, State) else slot.path


def row_of(slot: Slot) -> int:
    """Bytes of a row; of a State of an open one. ValueError: it has no rows."""
    rows = slot.open if isinstance(slot, State) else slot
    if not isinstance(rows, Rows | Entries):
        raise ValueError(f"{slot.path}: a {type(slot).__name__} has no place in vLLM's caches")
    return rows.record.size(rows.dim)


def stride_of(slot: Slot) -> int:
    """Tokens that a row stands for."""
    return slot.stride if isinstance(slot, Entries) else 1


def aligned(size: int) -> int:
    """The next multiple of ALIGNED bytes."""
    return -(-size // ALIGNED) * ALIGNED


def kinds_of(
    slots: Sequence[Slot], page_tokens: int, entry_tokens: int
) -> Iterator[dict[str, Any]]:
    """The arguments of each cache that a layer's slots need: its rows' of near tokens, those of all tokens, those of
    its entries. entry_tokens: of a page of entries, a multiple of all strides."""
    rows = [slot for slot in slots if not isinstance(slot, Entries)]
    entries = [slot for slot in slots if isinstance(slot, Entries)]
    for slot in slots:
        row_of(slot)
    rows += [entry.open for entry in entries]
    near = [slot for slot in rows if isinstance(slot, Rows) and slot.keep is not None]
    if near:
        keep = max(slot.keep for slot in near if slot.keep is not None)
        yield {"slots": near, "tokens": page_tokens, "keep": keep}
    for slot in rows:
        if isinstance(slot, State):
            if slot.chunk % page_tokens:
                raise ValueError(
                    f"{slot.path}: block_size {page_tokens} does not divide the scan's chunk of {slot.chunk}"
                )
            yield {"slots": [slot], "tokens": slot.chunk, "keep": slot.chunk + 1}
        elif slot not in near:
            yield {"slots": [slot], "tokens": page_tokens, "keep": None}
    for stride in sorted({entry.stride for entry in entries}):
        of = [entry for entry in entries if entry.stride == stride]
        yield {"slots": of, "tokens": entry_tokens, "keep": None}


def pages(slots: Iterable[Slot], page_tokens: int, tokens: int, step_tokens: int) -> int:
    """About the most pages that one sequence of that many tokens holds, all groups together.

    A group is of caches with one window and as many tokens a page. In 0.26 all groups have as many: those of the
    rarest kind, or of the most frequent one if those are not half as many again.
    """
    alike = Counter((kind["tokens"], kind["keep"]) for kind in kinds(slots, page_tokens))
    least, most = min(alike.values()), max(alike.values())
    size = most if STRIDES or most < 1.5 * least else least
    return sum(
        -(-count // size)
        * (-(-(tokens if keep is None else min(tokens, keep - 1 + step_tokens)) // page) + 1)
        for (page, keep), count in alike.items()
    )
