"""The audit: every page is either free once, or held by as many owners as its count."""

from __future__ import annotations

from collections import Counter

from kvjax.serve.ledger.blocks import Ledger
from kvjax.serve.ledger.tree import PrefixTree


def audit(ledger: Ledger, tree: PrefixTree | None = None) -> list[str]:
    """List the inconsistencies of a ledger and its tree, one sentence each; empty if there are none.

    >>> ledger = Ledger(2)
    >>> ledger.take(0, 1)
    [0]
    >>> ledger.counts[0] = 0
    >>> audit(ledger)
    ['page 0 has 1 holders, and its count says 0', 'page 0 is lost: neither free nor counted']
    """
    found = []
    held = Counter(page for table in ledger.tables.values() for page in table)
    kept = Counter(node.page for node in tree.nodes()) if tree else Counter()
    free = Counter(ledger.free_list)
    for owner, table in ledger.tables.items():
        found += [f"sequence {owner} holds page {p} twice" for p, n in Counter(table).items() if n > 1]
    for page in range(ledger.pages):
        holders = held[page] + kept[page]
        if holders != ledger.counts[page]:
            found.append(f"page {page} has {holders} holders, and its count says {ledger.counts[page]}")
        if free[page] > 1:
            found.append(f"page {page} is {free[page]} times in the free list")
        if free[page] and (holders or ledger.counts[page]):
            found.append(f"page {page} is free and held")
        if not free[page] and not ledger.counts[page]:
            found.append(f"page {page} is lost: neither free nor counted")
        if kept[page] != (page in ledger.kept):
            found.append(
                f"page {page} is {kept[page]} times in the tree, the ledger says {page in ledger.kept}"
            )
    for node in tree.nodes() if tree else ():
        before = node.parent.page if node.parent else -1
        if before >= 0 and ledger.counts[before] == 1 < ledger.counts[node.page]:
            found.append(f"page {node.page} is held without page {before} before it, which cannot be evicted")
    idle = sum(ledger.counts[page] == 1 for page in ledger.kept)
    if idle != ledger.idle:
        found.append(f"{idle} pages could be evicted, and the ledger says {ledger.idle}")
    return found
