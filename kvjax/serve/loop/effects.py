"""The loop's effects, and the replies to them. An interpreter performs effects."""

from __future__ import annotations

import math
from typing import NamedTuple

from kvjax.serve.requests import Request, RequestProgress


class Wait(NamedTuple):
    """Nothing can run: wait for a request, or until a time in seconds, at which a call returns."""

    until: float = math.inf


class Move(NamedTuple):
    """Moves all slots of some requests to host memory (`out`), and those of others back (`back`)."""

    out: list[RequestProgress]
    back: list[RequestProgress]


class Counts(NamedTuple):
    """What an iteration computes: tokens, slots that it reads, and pairs of a query and a key.

    passes: how often it reads the weights.
    """

    tokens: int
    slots: int
    pairs: int
    passes: int = 1


class RunIteration(NamedTuple):
    """An iteration, up to `steps` times: which requests decode a token, and how many tokens others prefill.

    standing: rows of finished requests, computed in vain. shared: slots that `write` would read again, were
    pages that several rows share not read once (ByNode). Pages are in the ledger's tables. An interpreter
    stops early when a request finishes or arrives, and at `until`, when a call returns.
    """

    write: list[RequestProgress]
    read: list[tuple[RequestProgress, int]]
    steps: int
    standing: int
    shared: int = 0
    until: float = math.inf

    def counts(self, again: int = 0) -> Counts:
        """Count what its first iteration computes. again: how often a method reads its prompt again."""
        rows = len(self.write)
        slots = sum(entry.slots for entry in self.write) + rows
        # Slots are read once where rows share them; products are computed for every row.
        tokens, pairs, slots = rows + self.standing, slots, slots - self.shared
        for entry, count in self.read:
            slots += entry.stored + count + again * entry.goal
            pairs += count * entry.stored + count * (count + 1) // 2 + again * count * entry.goal
            tokens += (1 + again) * count
        return Counts(tokens, slots, pairs)


class Done(NamedTuple):
    """An interpreter's reply: the time, iterations run, finished requests, and new arrivals.

    arrived is None when no more requests will arrive. gone: requests that are removed unfinished, because the
    client is gone or something failed; not after a Move, whose iteration is planned already. kept: requests
    whose prompt ended and left fewer slots than tokens, each with the slots of its longest list, and of all
    its lists on average.
    """

    now: float
    steps: int = 0
    ended: list[RequestProgress] = []
    arrived: list[Request] | None = []
    gone: list[RequestProgress] = []
    kept: list[tuple[RequestProgress, int, float]] = []


Effect = Wait | Move | RunIteration
