"""Nodes of shared pages: which pages a decode step reads once for several rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple


class PageRun(NamedTuple):
    """Consecutive pages that the same rows hold, after `first` others in the table of each of them."""

    pages: list[int]
    rows: list[int]
    first: int


def pieces(tables: Sequence[Sequence[int]], most: int) -> list[PageRun]:
    """List the pages of some rows by node of the tree that their tables form, each in equal pieces.

    A node is a longest run of pages that the same rows hold; pieces have at most `most` pages. Every page is
    in one piece, so a step that goes by pieces reads it once.

    >>> [(one.pages, one.rows) for one in pieces([[5, 6, 1], [5, 6, 2, 3]], most=4)]
    [([5, 6], [0, 1]), ([1], [0]), ([2, 3], [1])]
    """
    found: list[PageRun] = []
    todo = [(0, list(range(len(tables))))]
    while todo:
        first, rows = todo.pop()
        groups: dict[int, list[int]] = {}
        for row in rows:
            if first < len(tables[row]):
                groups.setdefault(tables[row][first], []).append(row)
        for group in groups.values():
            same = zip(*(tables[row][first:] for row in group), strict=False)
            last = first + sum(1 for _ in takewhile(lambda pages: len(set(pages)) == 1, same))
            found += _cut(list(tables[group[0]][first:last]), group, first, most)
            todo.append((last, group))
    return sorted(found, key=lambda one: (one.first, one.rows))


def _cut(pages: list[int], rows: list[int], first: int, most: int) -> list[PageRun]:
    count = -(-len(pages) // most)
    cuts = [len(pages) * i // count for i in range(count + 1)]
    return [PageRun(pages[a:b], rows, first + a) for a, b in zip(cuts, cuts[1:], strict=False)]


def read_again(tables: Sequence[Sequence[int]]) -> int:
    """How many pages a step reads more than once where every row reads all of its own.

    >>> read_again([[5, 6, 1], [5, 6, 2, 3]])
    2
    """
    return sum(map(len, tables)) - len({page for table in tables for page in table})
