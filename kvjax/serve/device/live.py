"""`Live`: requests that other threads submit while an engine runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from kvjax.serve.device.jobs import Job
from kvjax.serve.requests import Request


class Closed(Exception):
    """No more requests are accepted."""


class Live:
    """Requests from other threads that arrive while the engine runs; the `Source` of an engine.

    began: when its clock was 0, by `time.perf_counter`; default now.
    """

    def __init__(self, began: float | None = None) -> None:
        self.changed, self.coming, self.closed = threading.Condition(), [], False
        self.accept: Callable[[Job, float], Request] | None = None
        self.began = time.perf_counter() if began is None else began

    def now(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.began

    def arrived(self) -> list[Request] | None:
        """Return the requests since the last call; None if no more will arrive."""
        with self.changed:
            coming, self.coming = self.coming, []
            closed = self.closed
        assert self.accept is not None
        found = [self.accept(job, self.now()) for job in coming]
        return None if closed and not found else found

    def wait(self) -> None:
        """Wait until a request arrives, or no more will."""
        with self.changed:
            self.changed.wait_for(lambda: self.coming or self.closed)

    def put(self, job: Job) -> None:
        """Submit a request to the engine."""
        with self.changed:
            if self.closed:
                raise Closed
            self.coming.append(job)
            self.changed.notify()

    def close(self) -> None:
        """Mark the end: no more requests will arrive."""
        with self.changed:
            self.closed = True
            self.changed.notify()
