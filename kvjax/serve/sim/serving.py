"""`simulate`: requests served in simulated time, by one instance of a model or by several."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from kvjax.base.errors import InputError
from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Apart, SkipJoin, Whole
from kvjax.serve.loop import ServingLoop
from kvjax.serve.requests import Request
from kvjax.serve.sim.apart import apart
from kvjax.serve.sim.calendar import Outcome, one_instance
from kvjax.serve.sim.compression import Compression
from kvjax.serve.sim.costs import Costs


def simulate(
    system: System, requests: Iterable[Request], costs: Costs, *, pages: int | None = None,
    compression: Compression | None = None, steps: int | None = None,
    watch: Callable[[ServingLoop], None] | None = None,
) -> Outcome:  # fmt: skip
    """Serve requests in simulated time.

    Args:
        system: the system to simulate.
        requests: in any order; each has its arrival time.
        costs: the seconds of iterations and moves.
        pages: the size of every device's pool (default: all of the memory of `costs`).
        compression: of every request's cache (default: none). Where slots are evicted, no prefix is shared.
        steps: the most iterations at a time. It changes no result, only how long the simulation takes.
        watch: called with the loop before every effect.

    Returns:
        An `Outcome`; `kvjax.serve.load.metrics` computes its metrics.

    Raises:
        InputError: for a pool without a page, two requests of one id, and requests with calls on a system
            whose batches end together or that prefills elsewhere.

    >>> costs = Costs("by hand", 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1e3, 1.0)
    >>> simulate(System(), [Request(0, 0.0, 10, 3)], costs).ends.tolist()
    [1.0, 2.0, 3.0]
    """
    queue = sorted(requests, key=lambda one: (one.arrived, one.id))
    how = compression or Compression()
    costs = costs.compressed(how.bytes)
    if not how.keeps_all:
        queue = [dataclasses.replace(one, keys=(), span=0) for one in queue]
    count = costs.pages(system.page) if pages is None else pages
    if count < 1:
        raise InputError(
            f"{costs.memory:.3g} bytes hold no page of {system.page} tokens of {costs.slot_bytes:.3g} bytes: "
            "give more memory, or smaller pages"
        )
    if len({one.id for one in queue}) < len(queue):
        raise InputError("two requests have one id, expected an id for each: number them anew")
    _check_calls(system, queue)
    if isinstance(system.split, Apart):
        return apart(system, system.split, queue, costs, how, count, steps, watch)
    return one_instance(system, queue, costs, how, count, steps, watch)


def _check_calls(system: System, queue: list[Request]) -> None:
    words = (system.batch, Whole), (system.split, Apart), (system.order, SkipJoin)
    word = next((word for word, kind in words if isinstance(word, kind)), None)
    caller = next((one.id for one in queue if one.calls), None)
    if word is not None and caller is not None:
        raise InputError(
            f"request {caller} waits for other programs, and {word!r} has no place for such requests: take a "
            "system of iterations on one device, such as lamps"
        )
