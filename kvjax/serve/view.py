"""What a policy sees, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvjax.serve.requests import Entry


class Match(NamedTuple):
    """What the tree has of a request: tokens, pages, and of these those that nobody else holds."""

    tokens: int = 0
    pages: int = 0
    idle: int = 0


class View(NamedTuple):
    """All that a policy may look at; it changes nothing of it.

    waiting: those that hold nothing, in order of arrival. reading, writing: those that hold pages. away:
    those in host memory. standing: those that ended in a static batch that goes on. free: pages that are free
    or may be evicted, of `pages`. match(entry): what the tree has of it. gives(entry): pages it would leave.
    """

    now: float
    page: int
    pages: int
    free: int
    waiting: list[Entry]
    reading: list[Entry]
    writing: list[Entry]
    away: list[Entry]
    standing: list[Entry]
    match: Callable[[Entry], Match]
    gives: Callable[[Entry], int]


class Plan(NamedTuple):
    """What happens next: who gives way (`out`), who comes back from the host, and then an iteration.

    write: who writes a token. read: (who, how many tokens of its prompt). steps: how many iterations like
    this may follow each other, as long as nobody ends or arrives.
    """

    write: list[Entry] = []
    read: list[tuple[Entry, int]] = []
    out: list[Entry] = []
    back: list[Entry] = []
    steps: int = 1
