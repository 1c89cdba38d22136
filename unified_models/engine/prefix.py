"""The prefix index: a name for the first n * block tokens of a sequence, and the longest prefix still in memory.

A name is a hash over the weight version and all tokens so far, chained block by block, so equal names mean equal
tokens under equal weights. A page is found by the name of the tokens up to its own end.
"""

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from unified_models.engine.table import PageTable


def extend(digests: list[bytes], tokens: Sequence[int], end: int, block: int, version: int) -> None:
    """Append the names of the complete blocks within the first `end` tokens that the list lacks."""
    for i in range(len(digests), end // block):
        before = digests[-1] if digests else b"version %d" % version
        content = array("q", tokens[i * block : (i + 1) * block]).tobytes()
        digests.append(blake2b(before + content, digest_size=16).digest())


def longest(tables: Iterable[PageTable], digests: list[bytes], block: int, limit: int) -> int:
    """The most tokens, at most `limit` and a multiple of `block`, after which every group can go on from pages that
    are still in memory: all complete pages where everything is kept, those within reach of the window elsewhere."""
    best = [n * block for n in range(min(len(digests), limit // block) + 1)]
    for table in tables:
        if len(best) == 1:
            break
        pages = best[-1] // table.page_tokens
        names = (digests[(k + 1) * table.page_tokens // block - 1] for k in range(pages))
        run = [0]  # run[k]: how many pages in a row are in memory just before page k
        for name in names:
            run.append(run[-1] + 1 if table.pool.find(name) is not None else 0)
        best = [n for n in best if reaches(table, n, run)]
    return best[-1]


def reaches(table: PageTable, tokens: int, run: list[int]) -> bool:
    """Whether the pages that `table` needs after `tokens` tokens are among those in memory."""
    if table.keep is not None and tokens % table.page_tokens:
        return False  # the window would reach into a page that the new sequence still writes
    numbers = table.needed(tokens)
    return run[numbers.stop] >= len(numbers)
