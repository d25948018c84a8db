"""Read, change and write back tiles of many KV heads, with all copies in flight at once.

A copy must start at a tile, so a single row cannot be written. Heads of one call must not share a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kvjax.pallas_kernels.streaming import start, wait


def rewrite(
    lists: int,
    writes: Callable[[Any], Any],
    places: Callable[[Any], list[tuple[Any, Any]]],
    change: Callable[[Any], None],
    semaphores: tuple[Any, Any],
    *,
    find: Callable[[Any], None] = lambda n: None,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Call change(n) on the buffers of every head n that writes, between their copies in and back.

    places(n): head n's tiles, each with its buffer. semaphores: one per head for incoming copies, and one for
    outgoing. find(n): computes what writes(n) and places(n) need, called before them. meanwhile(): other work
    while the tiles arrive.
    """
    come, gone = semaphores

    def each(act: Callable[[Any], None], before: Callable[[Any], None] = lambda n: None) -> None:
        def one(n: Any, carry: Any) -> Any:
            before(n)
            pl.when(writes(n))(lambda: act(n))
            return carry

        jax.lax.fori_loop(0, lists, one, 0, unroll=2 - lists % 2)

    def coming(n: Any) -> list[Any]:
        return [pltpu.make_async_copy(there, here, come.at[n]) for there, here in places(n)]

    def going(n: Any) -> list[Any]:
        return [pltpu.make_async_copy(here, there, gone) for there, here in places(n)]

    def read(n: Any) -> None:
        for copy in coming(n):
            start(copy)

    def changed(n: Any) -> None:
        for copy in coming(n):
            wait(copy)
        change(n)
        for copy in going(n):
            start(copy)

    def finished(n: Any) -> None:
        for copy in going(n):
            wait(copy)

    each(read, find)
    meanwhile()
    each(changed)
    each(finished)
