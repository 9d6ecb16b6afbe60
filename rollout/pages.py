"""The pages of a KV cache: who holds which. Pure host code.

A page has room for `PAGE_TOKENS` tokens of every layer. It is held by any number of samples at once, as the full pages
of a prompt are by those of its group, and free again when the last of them lets it go.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

PAGE_TOKENS = 16


def pages_for(tokens: int) -> int:
    """The pages that so many tokens fill, the last one perhaps in part."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """The books of `total` pages, numbered from 0. The lowest free pages are taken first, so that equal histories give
    equal pages."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.holders = [0] * total  # of each page
        self.peak = 0  # pages held at once, at most
        self._free = list(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes free pages for their first holder. Raises ValueError where there are too few."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are wanted, {len(self._free)} of {self.total} are free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        self.peak = max(self.peak, self.total - self.free)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to pages that have one."""
        for page in pages:
            assert self.holders[page] > 0, "a page that nobody holds has no contents to share"
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Takes a holder from each of these pages; those that have none left are free."""
        for page in pages:
            assert self.holders[page] > 0, "a page is let go by one who does not hold it"
            self.holders[page] -= 1
            if not self.holders[page]:
                heapq.heappush(self._free, page)
