"""`Service`: an engine in a thread of its own; requests may be submitted and cancelled at any time."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from kvjax.base.errors import InputError
from kvjax.grammar import Method
from kvjax.models.model import Model
from kvjax.serve.device.engine import Engine, check_mesh
from kvjax.serve.device.jobs import Job, Prompt, job_of
from kvjax.serve.device.live import Closed, Live
from kvjax.serve.grammar import System
from kvjax.serve.grammar.words import Arrival, Iterations
from kvjax.serve.loop import ServingLoop
from kvjax.serve.policies.room import pages as pages_of
from kvjax.serve.requests import ENDED, GONE, REFUSED, Request

LOG = logging.getLogger("kvjax.serve")
ENDS = (ENDED, REFUSED, GONE)


def _most(job: Job) -> int:
    """How many tokens are stored when a job ends."""
    return len(job.tokens) + job.most - 1


class Full(Exception):
    """The service has as many requests as it accepts at a time."""


class Limits(NamedTuple):
    """The limits of a service: tokens of a prompt and its output, and requests that run or wait.

    rows: the most requests in one decode step.
    """

    context: int = 2048
    waiting: int = 256
    rows: int = 16


class Service:
    """Serves requests in a thread until it is closed.

    If a policy raises, a default policy schedules that iteration. A request that fails does not affect
    others. If the engine fails, running requests get an error and a new engine takes over. counts: how often
    each of these happened, by name.
    """

    def __init__(
        self, model: Model, system: System, pages: int, limits: Limits, method: Method | str | None = None
    ):
        self.model, self.system, self.pages, self.limits, self.method = model, system, pages, limits, method
        self.counts: Counter[str] = Counter()
        self.ended: dict[int, Callable[[Job], None]] = {}
        self.jobs: dict[int, Job] = {}
        self._lock, self._next = threading.Lock(), 0
        self._renew()
        self.thread = threading.Thread(target=self._serve, name="kvjax-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread."""
        self.thread.start()

    def submit(self, given: Prompt, told: Callable[[Job], None], ended: Callable[[Job], None]) -> Job:
        """Submit a request; `told` is called after each token and `ended` once, in the engine's thread.

        Raises InputError for a request that cannot be answered, `Full`, and `Closed`.
        """
        read, new = len(given.tokens), given.max_new_tokens
        if read + new > self.limits.context:
            raise InputError(
                f"the prompt has {read} tokens and {new} are to follow, more than the {self.limits.context} "
                "that this server takes: shorten the prompt, or lower max_tokens"
            )
        with self._lock:
            id = self._next
            self._next += 1
        job = job_of(self.model, id, given, self.method)
        check_mesh(self.model, job.method, self.system.page)
        holding = self.engine.holding(job.method)
        asked = Request(id, 0.0, len(job.tokens), job.most, holding=holding)
        need = pages_of(self.system.place, asked, _most(job))
        if need > self.pages:
            raise InputError(
                f"the request needs up to {_most(job)} tokens of room, more than the pool of {self.pages} "
                f"pages of {self.system.page} has: shorten it"
            )
        job.told = told
        with self._lock:
            if len(self.jobs) >= self.limits.waiting:
                self.counts["turned_away"] += 1
                raise Full
            self.jobs[id], self.ended[id] = job, ended
        try:
            self.source.put(job)
        except Closed:
            self._finish(id)
            raise
        self.counts["requests"] += 1
        self.counts["prompt_tokens"] += len(job.tokens)
        return job

    def cancel(self, job: Job) -> None:
        """Cancel a request: its pages are freed before the next iteration."""
        if job.id in self.jobs:
            self.engine.gone.add(job.id)

    def close(self, seconds: float | None = None) -> bool:
        """Accept no more requests, and wait until the running ones have ended; return whether all have."""
        self.source.close()
        if self.thread.is_alive():
            self.thread.join(seconds)
        return not self.thread.is_alive()

    def stop(self) -> None:
        """Accept no more requests, and end the running ones with an error."""
        self.source.close()
        for id, job in [*self.jobs.items()]:
            ended = self.ended.get(id)
            job.error = job.error or "the server is ending and had no time for the rest: ask another"
            self.engine.gone.add(id)
            if ended is not None:
                ended(job)

    def _renew(self) -> None:
        self.source = Live()
        limits = self.limits
        page = self.system.page
        most = min(-(-limits.context // page), self.pages)
        self.engine = Engine(self.model, self.system, self.pages, limits.rows, most, self.source)
        loop = self.engine.loop
        loop.spare = dataclasses.replace(
            self.system, order=Arrival(), batch=Iterations(self.system.batch.rows)
        )
        self.source.accept = self.engine.accept

    def _serve(self) -> None:
        while True:
            try:
                self.engine.run(self._look)
                # The requests that ended with the last iteration.
                return self._look(self.engine.loop)
            except Exception as error:
                LOG.exception("the engine failed, and those under way with it; a new one goes on")
                self.counts["engine_faults"] += 1
                self._start_again(f"the engine failed: {error!r:.200}")

    def _start_again(self, why: str) -> None:
        old = self.source
        with old.changed:
            waiting, old.coming = old.coming, []
            closed, old.closed = old.closed, True
        here = {job.id for job in waiting}
        for id, job in [*self.jobs.items()]:
            if id not in here:
                job.error = job.error or why
                self._finish(id)
        self._renew()
        for job in waiting:
            self.source.put(job)
        if closed:
            self.source.close()

    def _look(self, loop: ServingLoop) -> None:
        """Call back the clients of requests that have ended, and forget these requests."""
        for error in loop.faults:
            LOG.error("a policy failed, and simpler ones decided in its place: %r", error)
        self.counts["policy_faults"] += len(loop.faults)
        loop.faults.clear()
        self.engine.ends.clear()
        over = [entry for entry in loop.entries if entry.state in ENDS]
        if not over:
            return
        loop.entries = [entry for entry in loop.entries if entry.state not in ENDS]
        for entry in over:
            job = self.engine.jobs.pop(entry.request.id)
            job.entry = entry
            self.counts["preemptions"] += entry.preempted
            self.counts["matched_tokens"] += entry.matched
            self._finish(job.id)
        self.engine.gone &= self.jobs.keys()

    def _finish(self, id: int) -> None:
        with self._lock:
            job, ended = self.jobs.pop(id, None), self.ended.pop(id, None)
        if job is None or ended is None:
            return
        self.counts["generated_tokens"] += len(job.written)
        state = "failed" if job.error else "gone" if not job.over else "ended"
        self.counts[f"requests_{state}"] += 1
        ended(job)
