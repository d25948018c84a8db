"""Prefill and decoding on different devices of one process: an engine for each, and pages that move.

DistServe (Zhong et al., 2024, arXiv:2401.09670), section 4. Every engine runs in a thread of its own. When a
prompt has been read, its pages are copied through host memory to a decoding engine, which gives them pages of
its own pool. An instance is one device or, for a model on a mesh, as many as that has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from kvjax.base.errors import InputError
from kvjax.io.load import spread
from kvjax.models.model import Model
from kvjax.serve.device.engine import Engine, KnownRequests
from kvjax.serve.device.jobs import GeneratedToken, Job
from kvjax.serve.device.live import Live
from kvjax.serve.device.pages import RequestPages
from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Apart
from kvjax.serve.loop import Done, RunIteration, ServingLoop
from kvjax.serve.requests import ENDED, Request, RequestProgress
from kvjax.serve.sim import Outcome
from kvjax.serve.sim.apart import roles


class PrefillEngine(Engine):
    """An engine that reads prompts, generates one token each, and hands the slots to a decoding engine.

    hand: called with a job and its slots on the host, when the iteration of its first token has ended.
    """

    hand: Callable[[Job, tuple[np.ndarray, list[np.ndarray]]], None]

    def __init__(self, *how: Any):
        super().__init__(*how)
        self.leaving: list[Job] = []

    def is_done(self, job: Job) -> bool:
        """Let a job leave unless its text has ended; here it ends in any case."""
        if not job.over:
            job.place.leave(job.id)
            self.leaving.append(job)
        return True

    def _run(self, run: RunIteration) -> Done:
        done = super()._run(run)
        jobs, self.leaving = self.leaving, []
        for job in jobs:
            self.hand(job, job.place.away.pop(job.id))
        return done


class DecodeEngine(Engine):
    """An engine whose requests come with the slots of their prompts and one token."""

    def __init__(self, *how: Any):
        super().__init__(*how)
        self.parcels: dict[int, tuple[np.ndarray, list[np.ndarray]]] = {}

    def accept(self, job: Job, arrived: float) -> Request:
        """Make a `Request` whose slots are there: its one token is what it reads."""
        asked = super().accept(job, arrived)
        job.place.away[job.id] = parcel = self.parcels.pop(job.id)
        slots = int(parcel[0].max())
        self.moved += slots
        return dataclasses.replace(asked, prompt=slots + 1, output=job.most - 1, keys=(), span=0, ready=slots)

    def joins(self, job: Job, entry: RequestProgress) -> bool:
        """Slots that came are copied, not computed."""
        return super().joins(job, entry) and (bool(entry.preempted) or job.id not in job.place.away)

    def read(self, job: Job, entry: RequestProgress, count: int) -> GeneratedToken | None:
        """Copy slots that came into pages, and decode; after a preemption read the prompt itself."""
        place: RequestPages = job.place
        if entry.preempted or job.id not in place.away:
            return super().read(job, entry, count)
        place.come_back(job, place.tables[job.id])
        return next(place.write([job], 1).of(0))


def run_apart(
    model: Model, jobs: Sequence[Job], arrived: Sequence[float], system: System, sizes: tuple[int, int, int],
    watch: Callable[[ServingLoop], None] | None = None,
) -> tuple[Outcome, Engine]:  # fmt: skip
    """Serve jobs on `system.split`'s devices; return the outcome and an engine, which knows page sizes.

    sizes: pages of each engine's pool, rows, and pages of the longest request.
    """
    split = system.split
    assert isinstance(split, Apart)
    places = _places(system, model)
    source, live = [KnownRequests() for _ in range(split.prefill)], [Live() for _ in range(split.decode)]
    count, rows, most = sizes
    first, after = roles(system)

    def engine(kind: type[Engine], how: System, at: list[Any], source: Any) -> Any:
        return kind(_model_at(model, at), how, count, rows, most, source)

    readers = [engine(PrefillEngine, first, at, one) for at, one in zip(places, source, strict=False)]
    writers = [
        engine(DecodeEngine, after, at, one) for at, one in zip(places[split.prefill :], live, strict=True)
    ]
    devices = [at[0] for at in places]
    for one, writer in zip(live, writers, strict=True):
        one.accept = writer.accept
    turns = cycle(range(split.decode))

    def hand(job: Job, parcel: Any) -> None:
        # next() of a cycle is one step of the interpreter, so two threads never get the same turn.
        turn = next(turns)
        writers[turn].parcels[job.id] = parcel
        live[turn].put(job)

    order = sorted(range(len(jobs)), key=lambda i: (arrived[i], i))
    for i, reader in enumerate(readers):
        reader.hand = hand
        with jax.default_device(devices[i]):
            mine = order[i :: split.prefill]
            asked = [dataclasses.replace(reader.accept(jobs[j], arrived[j]), output=1) for j in mine]
        source[i].start(asked)
    for one in (*source, *live):
        one.began = source[0].began
    _together(readers, writers, devices, live, watch)
    return _outcome(system, jobs, arrived, readers, writers), readers[0]


def _places(system: System, model: Model) -> list[list[Any]]:
    """Return the devices of every instance: one, or as many as the model's mesh has."""
    size = 1 if model.on_mesh is None else model.on_mesh.mesh.size
    found, need = jax.devices(), system.devices * size
    if len(found) < need:
        raise InputError(
            f"{system.split!r} takes {need} devices, and there are {len(found)}: run on more, "
            f"or, for CPUs, set XLA_FLAGS=--xla_force_host_platform_device_count={need}"
        )
    return [found[i : i + size] for i in range(0, need, size)]


def _model_at(model: Model, devices: list[Any]) -> Model:
    """Place the model on one device, or split it over a mesh of these as it was over its own."""
    on = model.on_mesh
    if on is None:
        return dataclasses.replace(model, params=jax.device_put(model.params, devices[0]))
    mesh = Mesh(np.array(devices).reshape(on.mesh.axis_sizes), on.mesh.axis_names)
    return spread(model, mesh, on.rules)


def _together(
    readers: list[PrefillEngine],
    writers: list[DecodeEngine],
    devices: list[Any],
    live: list[Live],
    watch: Any,
) -> None:
    """Run every engine in a thread until all requests have ended."""

    def serve(engine: Engine, at: Any) -> None:
        with jax.default_device(at):
            engine.run(watch)

    with ThreadPoolExecutor(len(devices)) as threads:
        running = [threads.submit(serve, *one) for one in zip([*readers, *writers], devices, strict=True)]
        try:
            for one in running[: len(readers)]:
                one.result()
        finally:
            for one in live:
                one.close()
        for one in running[len(readers) :]:
            one.result()


def _outcome(
    system: System, jobs: Sequence[Job], arrived: Sequence[float], readers: list[PrefillEngine],
    writers: list[DecodeEngine],
) -> Outcome:  # fmt: skip
    """Collect the progress of both parts of every request; iterations follow each other engine by engine."""
    entries: dict[int, RequestProgress] = {}
    offset = 0
    for engine in (*readers, *writers):
        for part in engine.loop.entries:
            id, job = part.request.id, engine.jobs[part.request.id]
            whole = entries.get(id)
            if whole is None:
                asked = dataclasses.replace(part.request, output=job.most)
                whole = entries[id] = RequestProgress(asked, matched=part.matched)
            whole.state = part.state
            whole.spans += [[begin + offset, count] for begin, count in part.spans]
            whole.written += part.written
            whole.computed += part.computed
            whole.preempted += part.preempted
            if part.request.ready:
                # The decoding engine counts the first generated token as the last one of its prompt.
                whole.computed -= 1
                whole.evicted = whole.request.prompt - part.request.ready
            whole.stored, whole.shorter = whole.request.most, part.shorter
        offset += len(engine.ends)
    for job in jobs:
        job.entry = entries[job.id]
        assert job.entry.state != ENDED or job.over
    engines = (*readers, *writers)
    ends = np.concatenate([np.array(engine.ends) for engine in engines])
    moved, computed = (sum(getattr(one, name) for one in engines) for name in ("moved", "computed"))
    on = engines[0].model.on_mesh
    count = len(engines) * (1 if on is None else on.mesh.size)
    by = f"measured on {count} of {jax.devices()[0].device_kind}"
    return Outcome([entries[job.id] for job in jobs], ends, moved, computed, system, by)
