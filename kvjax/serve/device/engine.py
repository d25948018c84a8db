"""The engine: an interpreter of the loop's effects that carries them out on a device.

A policy never changes an answer: every request gets the tokens that `kvjax.generate` gives it alone.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np

from kvjax.base.errors import InputError
from kvjax.grammar import Method, Store
from kvjax.models.model import Model
from kvjax.serve.device.arena import Arena, PageFormat, shape_of
from kvjax.serve.device.code_step import CodePool
from kvjax.serve.device.compiling import compiled
from kvjax.serve.device.jobs import GeneratedToken, Job
from kvjax.serve.device.lanes import LaneCaches
from kvjax.serve.device.pages import PIECES, RequestPages, pages_refusal
from kvjax.serve.device.reading import size_of
from kvjax.serve.device.write import SLICE, WrittenTokens
from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Brought, ByNode, Together
from kvjax.serve.holding import Holding
from kvjax.serve.loop import Done, Effect, Move, RunIteration, ServingLoop, Wait
from kvjax.serve.loop.programs import MOST_ROWS, ProgramSizes
from kvjax.serve.requests import AWAY, Request, RequestProgress


def holding_of(model: Model, method: Method, page: int) -> Holding | None:
    """Return what pages of `page` uncoded tokens hold of a method's request; None if lanes store it."""
    if pages_refusal(model, method, page):
        return None
    return PageFormat(shape_of(model, page), method.store).holding


def check_mesh(model: Model, method: Method, page: int) -> None:
    """InputError for what is stored in lanes if the model lies on several devices: only pages are split."""
    if model.on_mesh is not None and (why := pages_refusal(model, method, page)):
        raise InputError(
            f"{model.name} lies on several devices, where a server stores slots in pages alone, and they "
            f"cannot hold {method.id}: {why}; serve an unsplit model, or another method"
        )


@runtime_checkable
class RequestSource(Protocol):
    """Where requests come from, and the time."""

    def now(self) -> float:
        """Seconds since the start."""
        ...

    def arrived(self) -> list[Request] | None:
        """Return the requests since the last call; None if no more will arrive."""
        ...

    def wait(self) -> None:
        """Wait until a request arrives, or no more will."""
        ...


class KnownRequests:
    """Requests that are all known at the start, each with its arrival time.

    clock: the time in seconds, of which idle time is skipped; None takes the wall clock, and idle time is
    slept.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self.queue: list[Request] = []
        self.clock, self.sleeps = clock or time.perf_counter, clock is None
        self.began, self.next = self.clock(), 0

    def start(self, requests: list[Request]) -> None:
        """Set the clock to 0 and store the requests that will arrive."""
        self.queue = sorted(requests, key=lambda one: (one.arrived, one.id))
        self.began = self.clock()

    def now(self) -> float:
        """Seconds since the start."""
        return self.clock() - self.began

    def arrived(self) -> list[Request] | None:
        """Return the requests that arrived since the last call; None once all have arrived."""
        first, now = self.next, self.now()
        if first == len(self.queue):
            return None
        while self.next < len(self.queue) and self.queue[self.next].arrived <= now:
            self.next += 1
        return self.queue[first : self.next]

    def wait(self) -> None:
        """Sleep until the next request arrives, or moves the clock there."""
        idle = max(0.0, self.queue[self.next].arrived - self.now()) if self.next < len(self.queue) else 0.0
        if self.sleeps:
            time.sleep(idle)
        else:
            self.began -= idle


class Engine:
    """Carries out a loop's effects on a device.

    jobs: the running requests, by id. arena: the pool's words. pages: for each way to encode slots, the
    requests in pages that are encoded so. ends: when every iteration ended, in seconds. record: whether
    iterations are measured. measured: `Counts` and seconds of the iterations of every
    `RunIteration` that compiled nothing, on average; moving: seconds of moves. moved: slots copied to
    and from host memory. computed: tokens that the model computed, idle rows included. gone: ids of requests
    whose client disconnected.
    """

    def __init__(
        self, model: Model, system: System, pages: int, rows: int, longest: int, source: RequestSource
    ):
        if not isinstance(system.split, Together):
            raise InputError(
                f"{system.split!r} takes several devices, expected Together(): `kvjax simulate` runs it, and "
                "`kvjax.serve.run` prefill and decoding apart"
            )
        if isinstance(system.weights, Brought):
            if model.on_mesh is not None:
                raise InputError(
                    f"{model.name} lies on several devices, expected one: take Resident() weights"
                )
            # Every call of a program brings them from host memory.
            model = dataclasses.replace(model, params=jax.device_get(model.params))
        self.model, self.source, self.loop = model, source, ServingLoop(system, pages)
        self.sizes = min(rows, MOST_ROWS), longest
        self.arena: Arena | None = None
        self.count = pages
        self.holdings: dict[Method, Holding | None] = {}
        self.pages: dict[Store | None, RequestPages] = {}
        self.lanes: dict[tuple[Method, int], LaneCaches] = {}
        self.jobs: dict[int, Job] = {}
        self.gone: set[int] = set()
        self.ends: list[float] = []
        self.moved = self.computed = 0
        self.measured: list[tuple[float, ...]] = []
        self.moving = self._since = 0.0
        self.record = False

    def holding(self, method: Method) -> Holding | None:
        """`holding_of` for the engine's model and pages."""
        if method not in self.holdings:
            self.holdings[method] = holding_of(self.model, method, self.loop.system.page)
        return self.holdings[method]

    def accept(self, job: Job, arrived: float) -> Request:
        """Make a `Request` of a job, and decide whether its slots are in pages or in lanes."""
        keys: tuple[Any, ...] = ()
        job.model = self.model
        page = self.loop.system.page
        holding = self.holding(job.method)
        if holding is None:
            size = size_of(job)
            kind = job.method, size
            if kind not in self.lanes:
                self.lanes[kind] = LaneCaches(job, size)
            job.place = self.lanes[kind]
        else:
            store = job.method.store
            if self.arena is None:
                self.arena = Arena(self.model, page, self.count)
            if store not in self.pages:
                attend = self.loop.system.attend
                by_node = attend.pages if isinstance(attend, ByNode) else 0
                self.pages[store] = RequestPages(self.model, self.arena, *self.sizes, store, by_node)
            job.place = self.pages[store]
            if job.method == Method():
                # Prefixes are shared under the full cache alone: only there does a page depend on its tokens
                # alone.
                text = job.tokens.tolist()
                keys = tuple(tuple(text[i : i + page]) for i in range(0, len(text) - page + 1, page))
        self.jobs[job.id] = job
        span = page if keys else 0
        return Request(job.id, arrived, len(job.tokens), job.most, keys, span, holding=holding)

    def page_sizes(self) -> tuple[int, dict[str, int]]:
        """Bytes of a page, and for each method with requests in pages how many tokens a page holds."""
        found = {
            job.method.id: job.place for job in self.jobs.values() if isinstance(job.place, RequestPages)
        }
        tokens = {id: place.kind.holding.page for id, place in found.items()}
        return self.arena.block_bytes if self.arena else 0, tokens

    def run(self, watch: Callable[[ServingLoop], None] | None = None) -> None:
        """Serve until no requests are left or expected. watch: called with the loop before every effect."""
        effects = self.loop.run()
        effect = next(effects)
        try:
            while True:
                if watch is not None:
                    watch(self.loop)
                effect = effects.send(self.carry_out(effect))
        except StopIteration:
            pass

    def carry_out(self, effect: Effect) -> Done:
        """Perform an effect of the loop, and return its result."""
        done = self._carry_out(effect)
        # The loop's decisions belong to the iteration that follows.
        self._since = done.now
        return done

    def _carry_out(self, effect: Effect) -> Done:
        if isinstance(effect, RunIteration):
            return self._run(effect)
        if isinstance(effect, Move):
            self._move(effect)
        elif isinstance(effect, Wait):
            self.source.wait()
        gone = [] if isinstance(effect, Move) else self._gone()
        return Done(self.source.now(), arrived=self.source.arrived(), gone=gone)

    def _job(self, entry: RequestProgress) -> Job:
        job = self.jobs[entry.request.id]
        job.entry = entry
        return job

    def _look(self) -> None:
        """Drop the slots of requests that were preempted or ended, and update page tables."""
        here = {entry.request.id for entry in (*self.loop.reading, *self.loop.writing)}
        for place in (*self.lanes.values(), *self.pages.values()):
            for id in place.holds() - here:
                place.drop(id)
        # The prefix tree may have replaced a page of a request since its last step.
        tables = self.loop.ledger.tables
        for pages in self.pages.values():
            pages.tables = {id: list(tables[id]) for id in here if self.jobs[id].place is pages}

    def _move(self, move: Move) -> None:
        began = self.source.now()
        # The ledger has already given the pages of preempted requests to others; their content is intact
        # until the next write.
        for entry in move.out:
            if entry.state == AWAY:
                self._job(entry).place.leave(entry.request.id)
                self.moved += entry.slots
        for entry in move.back:
            job = self._job(entry)
            job.place.come_back(job, list(self.loop.ledger.tables[job.id]))
            self.moved += entry.slots
        self.moving += self.source.now() - began

    def _run(self, run: RunIteration) -> Done:
        self._look()
        began, programs, sizes = self._since, compiled(), self.program_sizes()
        ended, failed, kept = [], [], []
        crews = self._crews(run)
        first, written = self._together(run, crews)
        for entry, count in run.read:
            job = self._job(entry)
            try:
                token = first[job.id] if job.id in first else self.read(job, entry, count)
            except (InputError, NotImplementedError) as error:
                job.error, token = str(error), None
            self.computed += count
            if token is not None:
                job.add(token)
            if job.error:
                failed.append(entry)
            elif token is not None:
                kept += self._kept(entry)
                ended += [entry] if self.is_done(job) else []
        steps = self._write(run, crews, written, ended, failed)
        if self.record and self.arena is not None:
            # A piece of a prompt may still be computed.
            jax.block_until_ready(self.arena.words)
        now = self.source.now()
        self.ends += np.linspace(began, now, steps + 1)[1:].tolist()
        if self.record and compiled() == programs:
            tokens, slots, pairs, passes = sizes.padded(run, run.counts(), steps)
            # Every further step reads a slot more of each row, if its table is not padded.
            more = 0.0 if sizes.widest else len(run.write) * (steps - 1) / 2
            self.measured.append((tokens, slots + more, pairs + more, passes, (now - began) / steps))
        self.computed += steps * (len(run.write) + run.standing)
        lost = {id(entry) for entry in failed}
        gone = failed + [entry for entry in self._gone() if id(entry) not in lost]
        left = {id(entry) for entry in gone}
        ended = [entry for entry in ended if id(entry) not in left]
        return Done(now, steps, ended, self.source.arrived(), gone, kept)

    def program_sizes(self) -> ProgramSizes:
        """Return the sizes of programs; with those of tables if uncoded pages are gathered."""
        plain = self.pages.get(None)
        if plain is None or plain.by_node or not isinstance(plain.pools[0], CodePool):
            return ProgramSizes(PIECES)
        return ProgramSizes(PIECES, plain.rows, self.loop.system.page, plain.most)

    def read(self, job: Job, entry: RequestProgress, count: int) -> GeneratedToken | None:
        """Read the next `count` tokens of a prompt; return the token after its last one, else None."""
        return job.place.read(job, entry.stored, count, entry.goal)

    def is_done(self, job: Job) -> bool:
        """Whether a job whose prompt has just been read has nothing more to do here."""
        return job.over

    def _kept(self, entry: RequestProgress) -> list[tuple[RequestProgress, int, float]]:
        """Return the entry with its slots in pages if its method evicted some of the prompt; else nothing."""
        place = self._job(entry).place
        entry.outside = not isinstance(place, RequestPages)
        if entry.outside:
            return []
        lists = place.lists[entry.request.id]
        mean = float(lists.mean())
        return [(entry, int(lists.max()), mean)] if mean < entry.goal else []

    def _crews(self, run: RunIteration) -> dict[int, list[RequestProgress]]:
        """Group the entries that decode by the identity of the place that stores them."""
        crews: dict[int, list[RequestProgress]] = {}
        for entry in run.write:
            crews.setdefault(id(self._job(entry).place), []).append(entry)
        return crews

    def joins(self, job: Job, entry: RequestProgress) -> bool:
        """Whether a part of a prompt can be computed in one batch with a step of others."""
        return isinstance(job.place, RequestPages) and job.method == Method()

    def _together(
        self, run: RunIteration, crews: dict[int, list[RequestProgress]]
    ) -> tuple[dict[int, GeneratedToken | None], dict[int, WrittenTokens]]:
        """Read parts of prompts with a step of the rows in the same pages, as one batch.

        Returns the tokens after the prompts by job, and those of the rows by place.
        """
        joint = [one for one in run.read if self.joins(self._job(one[0]), one[0])]
        joint = [one for one in joint if id(self._job(one[0]).place) in crews]
        if not joint:
            return {}, {}
        parts = [(self._job(entry), entry.stored, count, entry.goal) for entry, count in joint]
        place: RequestPages = parts[0][0].place
        tokens, found = place.read_and_write(parts, [self._job(entry) for entry in crews[id(place)]])
        return {part[0].id: token for part, token in zip(parts, tokens, strict=True)}, {id(place): found}

    def _write(
        self, run: RunIteration, crews: dict[int, list[RequestProgress]], done: dict[int, WrittenTokens],
        ended: list[RequestProgress], failed: list[RequestProgress],
    ) -> int:  # fmt: skip
        """Decode with every row until one ends; return the number of steps. done: what places wrote."""
        if not run.write:
            return 1
        one = len(crews) > 1 or run.read or getattr(self._job(run.write[0]).place, "apart", False)
        n = min(run.steps, SLICE, *(entry.request.output - entry.written for entry in run.write))
        n = 1 if one else n
        for place, crew in crews.items():
            jobs = [self._job(entry) for entry in crew]
            found = done[place] if place in done else jobs[0].place.write(jobs, n)
            n = found.count
            for row, (entry, job) in enumerate(zip(crew, jobs, strict=True)):
                for token in found.of(row):
                    job.add(token)
                if job.error:
                    failed.append(entry)
                elif job.over:
                    ended.append(entry)
        return n

    def _gone(self) -> list[RequestProgress]:
        """List the entries of requests whose client disconnected."""
        if not self.gone:
            return []
        loop = self.loop
        everyone = (*loop.waiting, *loop.reading, *loop.writing, *loop.away)
        found = [entry for entry in everyone if entry.request.id in self.gone]
        self.gone -= {entry.request.id for entry in found}
        return found
