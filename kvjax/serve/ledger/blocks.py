"""`Ledger`: which sequence holds which page. Pages are numbers here; their contents are on a device."""

from __future__ import annotations


class Ledger:
    """A free list, a reference count for every page, and a page table for every sequence.

    The tree counts as a holder of its pages; `idle` of them have no other holder.

    >>> ledger = Ledger(4)
    >>> ledger.take(7, 2)
    [0, 1]
    >>> ledger.free
    2
    """

    def __init__(self, pages: int):
        self.pages = pages
        self.counts = [0] * pages
        self.tables: dict[int, list[int]] = {}
        self.kept: set[int] = set()
        self.idle = 0
        self._free = list(range(pages - 1, -1, -1))

    @property
    def free(self) -> int:
        """How many pages are free."""
        return len(self._free)

    @property
    def free_list(self) -> tuple[int, ...]:
        return tuple(self._free)

    def take(self, owner: int, count: int) -> list[int]:
        """Append `count` free pages to a table. MemoryError if there are fewer."""
        if count > len(self._free):
            raise MemoryError(f"{count} pages were asked for, {len(self._free)} of {self.pages} are free")
        taken = [self._free.pop() for _ in range(count)]
        for page in taken:
            self.counts[page] = 1
        self.tables.setdefault(owner, []).extend(taken)
        return taken

    def share(self, owner: int, pages: list[int]) -> None:
        """Append pages that others hold to a table."""
        for page in pages:
            self._hold(page)
        self.tables.setdefault(owner, []).extend(pages)

    def fork(self, owner: int, child: int) -> None:
        """Add a second sequence with all pages of a first one (samples of one prompt)."""
        if child in self.tables:
            raise ValueError(f"sequence {child} has a table already")
        self.share(child, list(self.tables[owner]))

    def write(self, owner: int, at: int) -> tuple[int, int] | None:
        """Prepare to write a token to page `at` of a table: (from, to) if the page must be copied first.

        Copy on write: a shared page stays with its other holders.
        """
        table = self.tables[owner]
        old = table[at]
        if self.counts[old] == 1:
            return None
        (new,) = self.take(owner, 1)
        table[at] = table.pop()
        self._drop(old)
        return old, new

    def trim(self, owner: int, count: int) -> None:
        """Free the pages of a table after its first `count`."""
        table = self.tables[owner]
        while len(table) > count:
            self._drop(table.pop())

    def release(self, owner: int) -> None:
        """Give back all pages of a sequence, which is forgotten."""
        for page in reversed(self.tables.pop(owner)):
            self._drop(page)

    def gives(self, owner: int) -> int:
        """Pages that would become free or evictable if a sequence released its own."""
        return sum(self.counts[page] == 1 + (page in self.kept) for page in self.tables.get(owner, ()))

    def replace(self, owner: int, at: int, page: int) -> None:
        """Put a page that others hold in the place of one with the same content."""
        table = self.tables[owner]
        self._hold(page)
        self._drop(table[at])
        table[at] = page

    # --- the tree's pages ---

    def keep(self, page: int) -> None:
        """Make the tree a holder of a page."""
        if page in self.kept:
            raise ValueError(f"the tree holds page {page} already")
        self.counts[page] += 1
        self.kept.add(page)

    def forget(self, page: int) -> None:
        """Remove the tree as a holder of a page."""
        self.kept.remove(page)
        self.idle -= self.counts[page] == 1
        self._drop(page)

    def _hold(self, page: int) -> None:
        if self.counts[page] == 0:
            raise ValueError(f"page {page} is free, and cannot be shared")
        self.idle -= self.counts[page] == 1 and page in self.kept
        self.counts[page] += 1

    def _drop(self, page: int) -> None:
        self.counts[page] -= 1
        if self.counts[page] == 0:
            self._free.append(page)
        elif self.counts[page] == 1 and page in self.kept:
            self.idle += 1
