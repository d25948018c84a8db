"""Whether programs were compiled meanwhile: an iteration in which one was says nothing about its cost."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax

_heard = [0]


def compiled() -> int:
    """How many times JAX has traced or compiled something, since this was first asked.

    >>> before = compiled()
    >>> _ = jax.jit(lambda x: x + 1)(2)
    >>> compiled() > before
    True
    """
    _listen()
    return _heard[0]


@cache
def _listen() -> None:
    def hear(event: str, duration_secs: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile"):
            _heard[0] += 1

    jax.monitoring.register_event_duration_secs_listener(hear)
