"""The pages of one group of slots: who uses them, and which may be found again by their prefix."""

from collections import OrderedDict
from collections.abc import Callable

Scrub = Callable[[int], None]


class PagePool:
    """`num_pages` pages. A page in use has at least one user and is written by at most one: the sequence that took it.

    A page that was named (its content is that of a prefix) outlives its last user, until the pool runs dry; then the
    one released longest ago goes first. `scrub`, if given, is called with each page that is handed out or freed.
    """

    def __init__(self, num_pages: int, scrub: Scrub | None = None) -> None:
        self.num_pages = num_pages
        self.users = [0] * num_pages
        self.scrubs: list[Scrub] = []
        self._free = list(range(num_pages - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # named, unused; oldest first
        self._names: dict[int, bytes] = {}
        self._pages: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Pages that could be taken now."""
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        """Pages with a user."""
        return self.num_pages - self.available

    def take(self) -> int:
        """A page for one new user; its content is arbitrary."""
        assert self.available, "take() after the caller saw available > 0"
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            del self._pages[self._names.pop(page)]
        self.users[page] = 1
        self._scrub(page)
        return page

    def share(self, page: int) -> None:
        """One more user of a named page."""
        assert page in self._names, f"page {page} has no name to be found by"
        self._idle.pop(page, None)
        self.users[page] += 1

    def release(self, page: int) -> None:
        """One user less."""
        self.users[page] -= 1
        assert self.users[page] >= 0, f"page {page} was released once too often"
        if self.users[page]:
            return
        if page in self._names:
            self._idle[page] = None
        else:
            self._discard(page)

    def name(self, page: int, digest: bytes) -> None:
        """Let the page be found by the prefix that it completes; the first page of that name stays."""
        if digest not in self._pages and page not in self._names:
            self._pages[digest], self._names[page] = page, digest

    def find(self, digest: bytes) -> int | None:
        """The page of that name."""
        return self._pages.get(digest)

    def forget(self) -> None:
        """Take all names away: nothing is found any more."""
        idle = list(self._idle)
        self._idle.clear()
        self._names.clear()
        self._pages.clear()
        for page in idle:
            self._discard(page)

    def _discard(self, page: int) -> None:
        self._scrub(page)
        self._free.append(page)

    def _scrub(self, page: int) -> None:
        for scrub in self.scrubs:
            scrub(page)
