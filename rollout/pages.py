"""The pages of a KV cache, and the number of samples that hold each. Pure host code.

A page has room for `PAGE_TOKENS` tokens in every layer. Several samples may hold one page, as a group shares the full
pages of its prompt. A page is free when no sample holds it.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

PAGE_TOKENS = 16


def pages_for(tokens: int) -> int:
    """The number of pages that `tokens` fill; the last page may be partly filled."""
    return -(-tokens // PAGE_TOKENS)


class PagePool:
    """Counts the holders of `total` pages, numbered from 0. Takes the lowest free pages first: equal histories give
    equal pages."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.holders = [0] * total  # number of holders of each page
        self.peak = 0  # most pages held at once
        self._free = list(range(total))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Takes free pages for their first holder. Raises ValueError if there are too few."""
        if count > len(self._free):
            raise ValueError(f"{count} pages are wanted, {len(self._free)} of {self.total} are free")
        pages = [heapq.heappop(self._free) for _ in range(count)]
        for page in pages:
            self.holders[page] = 1
        self.peak = max(self.peak, self.total - self.free)
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a holder to each of these pages, which have one already."""
        for page in pages:
            assert self.holders[page] > 0, "a page that nobody holds has no contents to share"
            self.holders[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Removes a holder from each of these pages; pages without a holder are free."""
        for page in pages:
            assert self.holders[page] > 0, "a page is let go by one who does not hold it"
            self.holders[page] -= 1
            if not self.holders[page]:
                heapq.heappush(self._free, page)
