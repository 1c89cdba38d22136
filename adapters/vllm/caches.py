"""Our slots as vLLM's caches: one layer for each, of bytes, with pages that vLLM's own managers hand out.

A State is a sliding window, too: its page covers one chunk and holds the chunk's open rows and the state after the last
of them, and a window of chunk + 1 tokens keeps the page of the last boundary. So vLLM's prefix cache finds it by the
rules of windows, at multiples of the chunk, and nothing is copied. A convolution before the scan reads a few rows; its
page is the scan's, too, of whose tokens it keeps the last ones.
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
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

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
    """The pages of one slot, as vLLM allocates and binds them.

    tokens: of a page. row: bytes of a row; stride: tokens that a row stands for. tail: bytes of a page beyond its rows.
    keep: tokens that stay readable, None: all. short: of a State, the Rows that lie in its pages.
    """

    def __init__(
        self,
        name: str,
        slot: Slot,
        *,
        tokens: int,
        row: int,
        stride: int,
        keep: int | None,
        short: Sequence[Rows] = (),
    ) -> None:
        super().__init__()
        self.layer_name, self.slot, self.tokens, self.stride, self.keep = (
            name,
            slot,
            tokens,
            stride,
            keep,
        )
        self.row, self.tail = row, 0
        self.short: dict[Slot, tuple[int, int]] = {}
        """where the rows of a slot begin in a page, and how many there are"""
        if isinstance(slot, State):
            self.tail = 4 * slot.size + HEADER
            # A copy as rows of tokens see it, half as large: decoding reads nothing else.
            self.tail += 2 * slot.size if isinstance(slot.open.record, TailRecord) else 0
            for rows in short:
                assert rows.keep is not None, f"{rows.path}: a bounded number of rows"
                self.short[rows] = tokens * row + self.tail, rows.keep
                self.tail += rows.keep * rows.record.size(rows.dim)
        self.kv_cache = torch.empty(0)
        self.block_bytes: int | None = None

    @property
    def rows_per_page(self) -> int:
        return self.tokens // self.stride

    @property
    def page_bytes(self) -> int:
        """What a page holds."""
        return self.rows_per_page * self.row + self.tail

    @property
    def padded_bytes(self) -> int:
        """The bytes of vLLM's page: as many for each of its rows."""
        aligned = -(-self.page_bytes // ALIGNED) * ALIGNED
        return -(-aligned // self.rows_per_page) * self.rows_per_page

    def get_attn_backend(self) -> type[Backend]:
        return Backend

    def get_kv_cache_spec(self, vllm_config: Any) -> Any:
        """A page of bytes: one head whose content is the page's bytes, spread over its rows.

        vLLM 0.26 knows rows of several tokens as latent attention's, and one page size for all of a model.
        """
        content = self.padded_bytes // self.rows_per_page
        fields: dict[str, Any] = {
            "block_size": self.tokens,
            "num_kv_heads": 1,
            "head_size": content,
            "head_size_v": 0,
            "dtype": torch.uint8,
            "dcp_sharded": False,
            "tokens_per_state": self.stride,
            "compress_ratio": self.stride,
            "page_size_padded": self.block_bytes,
        }
        kind = FullAttentionSpec if self.keep is None else SlidingWindowSpec
        if self.stride > 1 and not STRIDES:
            kind = MLAAttentionSpec
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
    """Give all caches one page size, that of the largest, where this release asks for it. Rows that are kept for good
    fill it; where prefixes are to be found, and that is in whole pages, up to the tokens of another page."""
    if STRIDES:
        return
    largest = max(cache.padded_bytes for cache in made)
    most = max(cache.tokens for cache in made) if prefixes else math.inf
    for cache in made:
        if cache.keep is None and cache.stride == 1:
            while 2 * cache.padded_bytes <= largest and 2 * cache.tokens <= most:
                cache.tokens *= 2
        cache.block_bytes = largest


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
    for slot in slots:
        if slot not in inside:
            for args in kinds_of(slot, page_tokens):
                yield args | {"short": short.get(slot, ())}


def parent(slot: Slot) -> str:
    """The path of the module that has the slot."""
    return slot.path.rpartition(".")[0]


def kinds_of(slot: Slot, page_tokens: int) -> Iterator[dict[str, Any]]:
    """The arguments of each cache that a slot with pages of its own needs."""
    if isinstance(slot, Rows):
        row = slot.record.size(slot.dim)
        yield {"slot": slot, "tokens": page_tokens, "row": row, "stride": 1, "keep": slot.keep}
    elif isinstance(slot, Entries):
        tokens = math.lcm(page_tokens, slot.stride)
        row = slot.record.size(slot.dim)
        yield {"slot": slot, "tokens": tokens, "row": row, "stride": slot.stride, "keep": None}
        yield from kinds_of(slot.open, page_tokens)
    elif isinstance(slot, State):
        if slot.chunk % page_tokens:
            raise ValueError(
                f"{slot.path}: block_size {page_tokens} does not divide the scan's chunk of {slot.chunk}"
            )
        row = slot.open.record.size(slot.open.dim)
        yield {"slot": slot, "tokens": slot.chunk, "row": row, "stride": 1, "keep": slot.chunk + 1}
    else:
        raise ValueError(f"{slot.path}: a {type(slot).__name__} has no place in vLLM's caches")


def pages(slots: Iterable[Slot], page_tokens: int, tokens: int, step_tokens: int) -> int:
    """About the most pages that one sequence of that many tokens holds, all groups together.

    A group is of caches with one window and as many tokens a page; in 0.26 of equal ones, as many in each group.
    """
    made = list(kinds(slots, page_tokens))
    alike = Counter((k["tokens"], k["keep"], k["row"], k["stride"]) for k in made)
    if STRIDES:
        alike = Counter({(*key, 0, 0): 1 for key in {kind[:2] for kind in alike}})
    least = min(alike.values())
    return sum(
        -(-count // least)
        * (-(-(tokens if keep is None else min(tokens, keep - 1 + step_tokens)) // size) + 1)
        for (size, keep, _, _), count in alike.items()
    )
