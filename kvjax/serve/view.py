"""What a policy sees, and what it returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvjax.serve.requests import RequestProgress


class Match(NamedTuple):
    """The tree's match for a request: tokens, pages, and how many of the pages have no other holder."""

    tokens: int = 0
    pages: int = 0
    idle: int = 0


class PolicyView(NamedTuple):
    """What a policy may read; it must not change it.

    waiting: requests that hold nothing, in order of arrival. reading, writing: those that hold pages, in
    prefill and in decoding. away: those in host memory. standing: those that finished in a static batch that
    goes on. free: pages that are free or evictable, of `pages`. match(entry): the tree's match. gives(entry):
    the pages that it would release. calling: those that hold pages while they wait for another program.
    """

    now: float
    page: int
    pages: int
    free: int
    waiting: list[RequestProgress]
    reading: list[RequestProgress]
    writing: list[RequestProgress]
    away: list[RequestProgress]
    standing: list[RequestProgress]
    match: Callable[[RequestProgress], Match]
    gives: Callable[[RequestProgress], int]
    calling: list[RequestProgress] = []


class Plan(NamedTuple):
    """The next actions: whom to preempt (`out`), who returns from the host, and then an iteration.

    write: the requests that decode a token. read: (request, how many prompt tokens to prefill). steps: how
    many such iterations may follow each other, as long as no request finishes or arrives.
    """

    write: list[RequestProgress] = []
    read: list[tuple[RequestProgress, int]] = []
    out: list[RequestProgress] = []
    back: list[RequestProgress] = []
    steps: int = 1
