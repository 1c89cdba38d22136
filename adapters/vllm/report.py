"""What vLLM was given, in one table: the caches of each group, the formats of the weights, and whose bits these are.

Logged when the weights are loaded. `python -m unified_models.adapters.vllm.report DIR` shows it without starting vLLM.
"""

import io
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from unified_models.adapters.vllm.caches import STRIDES, Cache, caches
from unified_models.adapters.vllm.plugin import found
from unified_models.context.slots import State
from unified_models.fingerprint import Fingerprint
from unified_models.model import LanguageModel

PAGE_TOKENS = 16  # vLLM's block size, where none is asked for


def cache_table(made: Iterable[Cache]) -> Table:
    """One row for the caches that are alike: tokens and bytes of a page, and the bytes of a page that hold nothing."""
    groups: dict[tuple[str, int, int | None, int, int], int] = Counter()
    for cache in made:
        kind = type(cache.slot).__name__
        lost = cache.padded_bytes - cache.page_bytes
        groups[kind, cache.tokens, cache.keep, cache.page_bytes, lost] += 1
    table = Table(title="caches", title_justify="left", box=None)
    for heading in ("slot", "caches", "tokens a page", "kept", "bytes a page", "bytes lost"):
        table.add_column(heading, justify="left" if heading == "slot" else "right")
    for (kind, tokens, keep, size, lost), count in groups.items():
        kept = "all" if keep is None else str(keep - (kind == State.__name__))
        cells = (count, tokens, kept, f"{size:,}", lost)
        table.add_row(kind, *map(str, cells))
    return table


@dataclass(frozen=True)
class Group:
    """Caches that share vLLM's blocks: how many, tokens of a block, the bytes of it that they use, and its own."""

    caches: int
    tokens: int
    used: int
    block: int

    @property
    def lost(self) -> int:
        """Bytes of a block that no cache of the group uses: all groups draw from blocks of one size."""
        return self.block - self.used


def groups(made: Iterable[Cache]) -> list[Group]:
    """As vLLM made them; within a step, while caches are bound and each knows its group's metadata. In 0.26 each has
    memory of its own, later the pages of a block lie side by side."""
    members: dict[int, list[Cache]] = {}
    for cache in made:
        members.setdefault(id(cache.metadata), []).append(cache)
    return [
        Group(
            len(group),
            group[0].tokens,
            sum(cache.page_bytes for cache in group),
            group[0].kv_cache.stride(0)
            * group[0].kv_cache.element_size()
            * (1 if STRIDES else len(group)),
        )
        for group in members.values()
    ]


def weights_table(model: LanguageModel) -> Table:
    """Weights and packed bytes of each number format."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for _, weight in model.weights():
        counts[weight.format.name] += 1
        sizes[weight.format.name] += sum(t.nbytes for t in weight().packed.values())
    table = Table(title="weights", title_justify="left", box=None)
    for heading in ("format", "weights", "bytes"):
        table.add_column(heading, justify="left" if heading == "format" else "right")
    for name, count in sorted(counts.items()):
        table.add_row(name, str(count), f"{sizes[name]:,}")
    return table


def text(model: LanguageModel, made: Sequence[Cache]) -> str:
    """Both tables, and the fingerprint that a trainer compares with its own."""
    out = io.StringIO()
    console = Console(file=out, width=100)
    mark = Fingerprint.of(model)
    console.print(
        f"{model.file()} in vLLM {found()}: numerics {mark.numerics}, backend {mark.backend}, {mark.chip}, "
        f"contract {mark.contract}",
        highlight=False,
    )
    console.print(weights_table(model))
    console.print(cache_table(made))
    return out.getvalue()


def main(arguments: Sequence[str]) -> int:
    """DIR [tokens of a page]."""
    import unified_models as um

    folder, *more = arguments
    model = um.load(Path(folder), weights="packed")
    page_tokens = int(more[0]) if more else PAGE_TOKENS
    print(text(model, list(caches(model.slots().values(), page_tokens, ""))))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
