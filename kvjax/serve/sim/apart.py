"""Prefill and decoding on different devices: an instance that prefills, then another that decodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Apart, Arrival, ByRow, Iterations, Together
from kvjax.serve.requests import ENDED, Request, RequestProgress
from kvjax.serve.sim.calendar import Outcome, one_instance
from kvjax.serve.sim.compression import Compression
from kvjax.serve.sim.costs import Costs


def apart(
    system: System, split: Apart, queue: list[Request], costs: Costs, how: Compression,
    *how_to_run: Any,
) -> Outcome:  # fmt: skip
    """Serve requests on `split.prefill` instances that prefill, and `split.decode` others that decode.

    Instances of a kind take requests in turn. Each slot of a prompt moves in `costs.move` seconds; the link
    has no queue. A prefilling instance frees the slots when the prompt ends. A decoding instance begins with
    the second token, and a request that is preempted there is prefilled there again. how_to_run: further
    arguments of `one_instance`, the same for each.
    """
    alone, after = roles(system)
    first = [dataclasses.replace(one, output=1) for one in queue]
    reads = _in_turn(alone, first, split.prefill, costs, how, *how_to_run)
    begun, decoding, moved = _by_id(reads), [], 0
    for one in queue:
        entry, ends = begun[one.id]
        if entry.state == ENDED and one.output > 1:
            slots = how.left(one.prompt)
            moved += slots
            at = float(ends[entry.spans[0][0]]) + slots * costs.move
            decoding.append(Request(one.id, at, slots + 1, one.output - 1, ready=slots))
    decoding.sort(key=lambda one: (one.arrived, one.id))
    writes = _in_turn(after, decoding, split.decode, costs, Compression(), *how_to_run)
    return _joined(system, queue, [*reads, *writes], moved, how)


def roles(system: System) -> tuple[System, System]:
    """Return what an instance that prefills does, and what one that decodes does."""
    first = dataclasses.replace(system, split=Together())
    after = dataclasses.replace(
        first, batch=Iterations(system.batch.rows), share=None, evict=None, order=Arrival(), attend=ByRow()
    )
    return first, after


def _in_turn(system: System, queue: list[Request], instances: int, *how_to_run: Any) -> list[Outcome]:
    return [one_instance(system, queue[i::instances], *how_to_run) for i in range(instances)]


def _by_id(outcomes: list[Outcome]) -> dict[int, tuple[RequestProgress, np.ndarray]]:
    return {entry.request.id: (entry, out.ends) for out in outcomes for entry in out.entries}


def _joined(
    system: System, queue: list[Request], outcomes: list[Outcome], moved: int, how: Compression
) -> Outcome:
    """One outcome of all instances: iterations follow each other instance by instance, not in time."""
    entries = {one.id: RequestProgress(one, state=ENDED) for one in queue}
    offset = 0
    for out in outcomes:
        for part in out.entries:
            whole = entries[part.request.id]
            whole.state = part.state if part.state != ENDED else whole.state
            whole.spans += [[first + offset, count] for first, count in part.spans]
            whole.written += part.written
            # The token that decoding begins with is none of the prompt.
            whole.computed += part.computed - (1 if part.request.ready else 0)
            whole.preempted += part.preempted
            whole.matched += 0 if part.request.ready else part.matched
            whole.stored, whole.evicted = (
                whole.request.most,
                whole.request.prompt - how.left(whole.request.prompt),
            )
        offset += len(out.ends)
    ends = np.concatenate([out.ends for out in outcomes])
    swapped, computed = (sum(getattr(out, name) for out in outcomes) for name in ("moved", "computed"))
    return Outcome([*entries.values()], ends, moved + swapped, computed, system, outcomes[0].costs)
