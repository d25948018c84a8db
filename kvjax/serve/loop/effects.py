"""What the loop asks for, and what it is told. Who carries effects out is an interpreter."""

from __future__ import annotations

from typing import NamedTuple

from kvjax.serve.requests import Entry, Request


class Wait(NamedTuple):
    """Nobody is there: wait for a request."""


class Move(NamedTuple):
    """Pages of these go to host memory (`out`), and come from there (`back`): all that they have stored."""

    out: list[Entry]
    back: list[Entry]


class Run(NamedTuple):
    """An iteration, up to `steps` times: who writes a token, and who reads how many tokens of its prompt.

    standing: rows that are computed for nothing, of requests that ended. Pages are in the ledger's tables.
    An interpreter stops early when somebody ends or arrives.
    """

    write: list[Entry]
    read: list[tuple[Entry, int]]
    steps: int
    standing: int


class Done(NamedTuple):
    """What an interpreter answers: the time, iterations that were made, who ended, and who arrived meanwhile.

    arrived is None when nobody will come any more. gone: who leaves without having ended, because whoever
    asked is no longer there or something failed; not after a Move, whose iteration is planned already.
    """

    now: float
    steps: int = 0
    ended: list[Entry] = []
    arrived: list[Request] | None = []
    gone: list[Entry] = []


Effect = Wait | Move | Run
