"""Serves requests that are known from the start: `run`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.base.checks import whole_number
from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.models.model import Model
from kvjax.serve.device.apart import run_apart
from kvjax.serve.device.engine import Engine, KnownRequests, check_mesh, holding_of
from kvjax.serve.device.jobs import Answer, Job, Prompt, job_of
from kvjax.serve.device.pages import PIECES
from kvjax.serve.device.write import SLICE
from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Apart
from kvjax.serve.holding import Holding
from kvjax.serve.loop import ServingLoop
from kvjax.serve.policies.room import pages as pages_of
from kvjax.serve.requests import Request
from kvjax.serve.sim import Outcome
from kvjax.serve.systems import system as as_system


class Served(NamedTuple):
    """The results of `run`: an answer for each request, in order, and the outcome for `load.metrics.metrics`.

    pages, page_bytes: how many pages the pool has, and the bytes of one (of every layer and KV head). tokens:
    for every method that lies in pages, how many tokens of a long text a page holds. measured: the costs of
    the iterations, in the form that `kvjax.serve.sim.read_costs` fits; None unless `record` is given.
    """

    answers: list[Answer]
    outcome: Outcome
    pages: int
    page_bytes: int
    tokens: dict[str, int]
    measured: dict[str, Any] | None = None


def run(
    model: Model, requests: Sequence[Prompt], system: System | str = "vllm", *,
    method: Method | str | None = None, pages: int | None = None,
    watch: Callable[[ServingLoop], None] | None = None, record: bool = False,
    clock: Callable[[], float] | None = None,
) -> Served:  # fmt: skip
    """Serve requests on this machine; each gets the tokens that `kvjax.generate` gives it alone.

    Requests of several methods may be in one run. The full cache, methods that select once, at the end of a
    prompt, and codes (`int8`, `int4`, `kivi`) are stored in pages of one pool, whose bytes go to whoever
    needs them; slots that are stored alike decode in one batch. All other methods, and models whose layers
    pages cannot hold, have a cache per request (lanes); caches of one method and size step together.

    Args:
        model: a model.
        requests: the requests.
        system: a system, whose policies schedule, or its text, such as "sarathi(tokens=256)". `distserve`
            takes a device for every instance, or as many as the model's mesh has, and all requests must lie
            in pages.
        method: the method of requests that name none.
        pages: the size of the pool, on each device (default: enough for all requests that may run at once).
            Lanes are not in the pool; for them it only limits how many requests run.
        watch: called with the loop before every effect.
        record: whether to measure iterations, each of which then waits for its end.
        clock: in seconds (default: the wall clock). With `time.process_time`, other load on the machine does
            not lengthen times; idle time is skipped. On one device.

    Returns:
        A `Served`: answers, and an outcome with every iteration's end.

    Raises:
        InputError: for what `kvjax.generate` would refuse, with the number of the request.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> done = run(model, [Prompt([1, 2, 3], 4), Prompt([1, 2, 4], 2, "h2o(budget=0.5)")])
    >>> [(answer.state, len(answer.tokens)) for answer in done.answers]
    [('ended', 4), ('ended', 2)]
    """
    chosen = as_system(system) if isinstance(system, str) else system
    jobs = [_checked(model, i, given, method) for i, given in enumerate(requests)]
    if not jobs:
        raise InputError("requests is empty, expected at least one: give a list of kvjax.serve.Prompt")
    rows = min(chosen.batch.rows, len(jobs))
    for job in jobs:
        check_mesh(model, job.method, chosen.page)
    holdings = {method: holding_of(model, method, chosen.page) for method in {job.method for job in jobs}}
    asked = [Request(job.id, 0.0, len(job.tokens), job.most, holding=holdings[job.method]) for job in jobs]
    most = max(pages_of(chosen.place, one, one.most) for one in asked)
    count = most * rows if pages is None else whole_number("pages", pages, 1, "pages of the pool")
    if isinstance(chosen.split, Apart):
        if record or clock:
            name = "record" if record else "clock"
            raise InputError(f"{name} measures one device, and {chosen.split!r} takes several: take vllm")
        _check_pages(jobs, holdings)
        arrived = [one.arrived for one in requests]
        outcome, engine = run_apart(model, jobs, arrived, chosen, (count, rows, min(most, count)), watch)
        size, tokens = engine.page_sizes()
        return Served([job.answer() for job in jobs], outcome, count, size, tokens)
    source = KnownRequests(clock)
    engine = Engine(model, chosen, count, rows, min(most, count), source)
    source.start([engine.accept(job, one.arrived) for job, one in zip(jobs, requests, strict=True)])
    engine.record = record
    engine.run(watch)
    for entry in engine.loop.entries:
        jobs[entry.request.id].entry = entry
    by, ends = f"measured on {jax.devices()[0].device_kind}", np.array(engine.ends)
    outcome = Outcome(engine.loop.entries, ends, engine.moved, engine.computed, chosen, by)
    size, tokens = engine.page_sizes()
    measured = _measured(engine, count, size, by) if record else None
    return Served([job.answer() for job in jobs], outcome, count, size, tokens, measured)


def _measured(engine: Engine, count: int, size: int, by: str) -> dict[str, Any]:
    """Measure what the iterations cost; return that, and the pool of `count` pages of `size` bytes."""
    page = engine.loop.system.page
    move = engine.moving / engine.moved if engine.moved else 0.0
    # Where all requests lie in lanes, a token has no bytes of the pool.
    size = size or page
    pool = {"memory": float(count * size), "slot_bytes": size / page}
    sizes = {"slice": SLICE, "pieces": [*PIECES], "gathers": engine.program_sizes().widest > 0}
    return {"by": by, "iterations": engine.measured, "move": move, **sizes, **pool}


def _check_pages(jobs: Sequence[Job], holdings: dict[Method, Holding | None]) -> None:
    """Only pages move between devices."""
    for job in jobs:
        if holdings[job.method] is None:
            raise InputError(
                f"request {job.id}: {job.method.id} is stored in a lane, and Apart() moves pages: take a "
                "system on one device, such as vllm"
            )


def _checked(model: Model, id: int, given: Any, method: Method | str | None) -> Job:
    if not isinstance(given, Prompt):
        raise InputError(f"request {id} is {given!r:.60}, expected a kvjax.serve.Prompt")
    try:
        return job_of(model, id, given, method)
    except InputError as error:
        raise InputError(f"request {id}: {error}") from error
