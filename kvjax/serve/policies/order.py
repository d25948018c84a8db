"""Who starts next: one function for each word of order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from kvjax.serve.grammar.words import (
    Arrival,
    Bins,
    LongestPrefix,
    MemoryTime,
    Order,
    PrefixGroups,
    Shortest,
    SkipJoin,
)
from kvjax.serve.requests import RequestProgress
from kvjax.serve.view import PolicyView


def ordered(order: Order, view: PolicyView, rows: int) -> Sequence[RequestProgress]:
    """Order the waiting requests, the next one first; with bins, those of one batch of `rows`."""
    if isinstance(order, Arrival | SkipJoin):
        return view.waiting
    if isinstance(order, Shortest):
        return sorted(view.waiting, key=lambda entry: (entry.request.expected, entry.age))
    if isinstance(order, LongestPrefix):
        return longest_prefix(order, view)
    if isinstance(order, PrefixGroups):
        return prefix_groups(view)
    if isinstance(order, MemoryTime):
        return sorted(view.waiting, key=lambda entry: (memory_time(order, entry), entry.age))
    return one_bin(order, view, rows)


def longest_prefix(order: LongestPrefix, view: PolicyView) -> list[RequestProgress]:
    """RadixAttention (arXiv:2312.07104, section 3.2): by tokens that the tree has, the most first."""
    head = sorted(view.waiting[: order.window], key=lambda entry: (-view.match(entry).tokens, entry.age))
    return head + view.waiting[order.window :]


def prefix_groups(view: PolicyView) -> list[RequestProgress]:
    """BatchLLM (arXiv:2412.03594): groups by first page, ordered by output tokens per input token."""

    def name(entry: RequestProgress) -> str:
        return repr(entry.keys[0]) if entry.keys else f"alone {entry.request.id}"

    groups = [list(group) for _, group in groupby(sorted(view.waiting, key=name), name)]

    def writes(group: list[RequestProgress]) -> float:
        read = sum(entry.goal - view.match(entry).tokens for entry in group)
        return sum(entry.request.expected for entry in group) / max(read, 1)

    groups.sort(key=lambda group: (-writes(group), group[0].age))
    return [entry for group in groups for entry in sorted(group, key=lambda entry: entry.age)]


def memory_time(order: MemoryTime, entry: RequestProgress) -> float:
    """LAMPS (arXiv:2410.18248, section 4): token-seconds that the rest of a request holds, as predicted.

    A call counts as the least that it may hold: its slots for its seconds, or while they are read again or
    moved out and back.

    >>> from kvjax.serve.requests import Call, Request
    >>> alone, calls = (Request(0, 0.0, 100, 11, calls=x) for x in ((), (Call(5, 2.0),)))
    >>> [memory_time(MemoryTime(10, 1000, 1000), RequestProgress(one)) for one in (alone, calls)]
    [115.5, 126.525]
    """
    request, left = entry.request, max(entry.request.expected - entry.written, 1)
    total = (entry.goal * left + left * (left - 1) / 2) / order.steps
    for call in request.calls[entry.called :]:
        slots = request.prompt + call.after
        total += slots * min(call.expected, slots / order.read, 2 * slots / order.moved)
    return total


def one_bin(order: Bins, view: PolicyView, rows: int) -> list[RequestProgress]:
    """Multi-Bin Batching (arXiv:2412.04504): the first bin to fill a batch, or the oldest request's bin."""
    bins: dict[int, list[RequestProgress]] = {}
    for entry in view.waiting:
        number = min((entry.request.expected - 1) * order.bins // order.longest, order.bins - 1)
        bins.setdefault(number, []).append(entry)
    full = [found for found in bins.values() if len(found) >= rows]
    if full:
        return min(full, key=lambda found: found[rows - 1].age)
    return min(bins.values(), key=lambda found: found[0].age, default=[])


def queue(order: SkipJoin, entry: RequestProgress) -> tuple[int, int]:
    """FastServe (arXiv:2305.05920, section 4.1): a request's queue, and the iterations left to it there.

    It joins the first queue whose quantum its prompt does not exceed, and moves down when a quantum is used
    up.

    >>> from kvjax.serve.requests import Request
    >>> queue(SkipJoin(quantum=4, tokens=100), RequestProgress(Request(0, 0.0, 700, 9), written=3))
    (1, 5)
    """
    level, cost = 0, -(-entry.request.prompt // order.tokens)
    while level < order.levels - 1 and order.quantum << level < cost:
        level += 1
    left = (order.quantum << level) - entry.written
    while left <= 0 and level < order.levels - 1:
        level += 1
        left += order.quantum << level
    return level, left if left > 0 else entry.request.most + 1
