"""Rows of tasks, made by worker processes while the device computes.

The rows of a step of `recall` and `pairs` are a function of the seed and the step, so that many steps can be
made at once. One process makes about 80 thousand tokens a second, which is slower than a GPU trains.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Protocol

from kvjax.train.data.packing import PackedRows, StreamPosition


class NumberedBatches(Protocol):
    """A source whose batches are a function of their number."""

    place: StreamPosition

    def batch(self, number: int, rows: int, length: int) -> PackedRows: ...


class Prefetcher:
    """A source that keeps two batches per process in flight; its rows equal those of the wrapped source.

    >>> from kvjax.train.data.sources import Pairs
    >>> ahead = Prefetcher(Pairs(seed=0), workers=1)
    >>> ahead.next(2, 16).tokens.shape
    (2, 17)
    >>> ahead.close()
    """

    def __init__(self, source: NumberedBatches, workers: int):
        self.source, self.place, self.depth = source, source.place, 2 * workers
        # Processes made by fork would share locks of jax's threads.
        self.pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _begin)
        self.under_way: deque[Future[PackedRows]] = deque()
        self.next_of: Any = None

    def next(self, rows: int, length: int) -> PackedRows:
        if self.next_of != (self.place.reading, rows, length):
            # After a new stage, or a changed place, the batches in flight are the wrong ones.
            self._drop()
        while len(self.under_way) < self.depth:
            number = self.place.reading + len(self.under_way)
            self.under_way.append(self.pool.submit(self.source.batch, number, rows, length))
        self.place.reading += 1
        self.next_of = (self.place.reading, rows, length)
        return self.under_way.popleft().result()

    def _drop(self) -> None:
        for made in self.under_way:
            made.cancel()
        self.under_way.clear()

    def close(self) -> None:
        """End the processes."""
        self._drop()
        self.pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """Ignore Ctrl-C, which the run handles; the end of the run also ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_the_run, daemon=True).start()


def _end_with_the_run() -> None:
    run = multiprocessing.parent_process()
    assert run is not None
    run.join()
    os._exit(1)
