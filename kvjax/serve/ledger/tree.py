"""`PrefixTree`: which pages hold which prefix; the least recently used is evicted first."""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterator, Sequence
from itertools import count

from kvjax.serve.ledger.blocks import Ledger


class Node:
    """A page of tokens that follow its ancestors' tokens."""

    __slots__ = ("key", "page", "parent", "children", "used")

    def __init__(self, key: Hashable, page: int, parent: Node | None):
        self.key, self.page, self.parent = key, page, parent
        self.children: dict[Hashable, Node] = {}
        self.used = 0


class PrefixTree:
    """RadixAttention's tree (arXiv:2312.07104, section 3.1) of whole pages.

    A node is a page, and its key is the page's tokens, or their hash. A sequence that holds a page holds all
    pages before it, so pages that only the tree holds are evicted leaf by leaf.

    >>> ledger = Ledger(4)
    >>> tree = PrefixTree(ledger)
    >>> ledger.take(0, 2)
    [0, 1]
    >>> tree.insert("ab", 0)
    >>> tree.match("abc")
    [0, 1]
    """

    def __init__(self, ledger: Ledger):
        self.ledger = ledger
        self.root = Node(None, -1, None)
        self._clock = count(1)
        # A heap of candidates for eviction: (last use of the node, a number that breaks ties, the node).
        self._leaves: list[tuple[int, int, Node]] = []

    def match(self, keys: Sequence[Hashable]) -> list[int]:
        """Find the pages of the longest prefix of `keys` that the tree holds."""
        return [node.page for node in self._path(keys)]

    def use(self, keys: Sequence[Hashable]) -> None:
        """Record that the longest prefix of `keys` was used now."""
        now, node = next(self._clock), None
        for node in self._path(keys):
            node.used = now
        if node is not None:
            self._offer(node)

    def insert(self, keys: Sequence[Hashable], owner: int) -> None:
        """Keep the first pages of a sequence under `keys`.

        If the tree holds a prefix already, the sequence swaps its own pages for the tree's: otherwise it
        would hold a page without the pages before it, which could then not be evicted.
        """
        now, node = next(self._clock), self.root
        for at, key in enumerate(keys):
            page, child = self.ledger.tables[owner][at], node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page, node)
                self.ledger.keep(page)
            elif child.page != page:
                self.ledger.replace(owner, at, child.page)
            child.used, node = now, child
        if node is not self.root:
            self._offer(node)

    def released(self, keys: Sequence[Hashable]) -> None:
        """Record that a sequence which held these pages released them: the last of them may be evictable."""
        for node in self._path(keys):
            last = node
        if keys and self.root.children.get(keys[0]):
            self._offer(last)

    def evict(self, wanted: int) -> int:
        """Free up to `wanted` pages that only the tree holds; return how many were freed."""
        done = 0
        while done < wanted and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            gone = node.page < 0 or node.children or self.ledger.counts[node.page] > 1
            if gone:
                continue
            if node.used != used:
                self._offer(node)
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[node.key]
            self.ledger.forget(node.page)
            node.page, done = -1, done + 1
            if parent is not self.root and not parent.children:
                self._offer(parent)
        return done

    def nodes(self) -> Iterator[Node]:
        """Yield the node of every page of the tree."""
        todo = [*self.root.children.values()]
        while todo:
            node = todo.pop()
            todo += node.children.values()
            yield node

    def _path(self, keys: Sequence[Hashable]) -> Iterator[Node]:
        node = self.root
        for key in keys:
            child = node.children.get(key)
            if child is None:
                return
            yield child
            node = child

    def _offer(self, node: Node) -> None:
        heapq.heappush(self._leaves, (node.used, next(self._clock), node))
