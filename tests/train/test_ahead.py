"""Rows that processes make ahead are those that the source would have made itself."""

import multiprocessing
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from kvjax.base.errors import InputError
from kvjax.train.data.packing import StreamPosition
from kvjax.train.data.prefetch import Prefetcher
from kvjax.train.data.sources import Pairs, source_of, words_of
from kvjax.train.settings import Data, Devices, Loop


def same(got, want):
    for x, y in zip(got[:2], want[:2], strict=True):
        np.testing.assert_array_equal(x, y)
        assert x.dtype == y.dtype


@pytest.mark.rotating
def test_stages_and_places_give_the_rows_of_the_source():
    ahead, alone = Prefetcher(Pairs(seed=3), workers=1), Pairs(seed=3)
    try:
        for rows, length in ((2, 16), (2, 16), (3, 16), (2, 32), (2, 32)):
            same(ahead.next(rows, length), alone.next(rows, length))
        assert ahead.place == alone.place == StreamPosition(reading=5)
        # As a run does that goes on from a checkpoint.
        ahead.place, alone.place = StreamPosition(reading=2), StreamPosition(reading=2)
        same(ahead.next(2, 32), alone.next(2, 32))
        assert multiprocessing.active_children()
    finally:
        ahead.close()
    assert not multiprocessing.active_children()


RUN = """
import multiprocessing, time
from kvjax.train.data.prefetch import Prefetcher
from kvjax.train.data.sources import Pairs

if __name__ == "__main__":
    Prefetcher(Pairs(seed=0), workers=1).next(2, 16)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(100)
"""


@pytest.mark.rotating
def test_a_run_that_is_killed_leaves_no_process(tmp_path):
    (tmp_path / "run.py").write_text(RUN)
    with subprocess.Popen([sys.executable, tmp_path / "run.py"], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        worker = psutil.Process(int(run.stdout.readline()))
        assert worker.is_running()
        run.kill()
    until = time.monotonic() + 20
    while lives(worker) and time.monotonic() < until:
        time.sleep(0.05)
    assert not lives(worker)


def lives(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_run_of_tasks_has_workers_and_one_of_texts_has_none():
    for data in (Data(kind="recall"), Data(kind="pairs")):
        source, _ = source_of(data, words_of(data), Loop(length=16), segments=False, workers=2)
        assert isinstance(source, Prefetcher) and source.depth == 4
        source.close()
    data = Data(kind="python")
    source, _ = source_of(data, words_of(data), Loop(), segments=False, workers=2)
    assert not isinstance(source, Prefetcher)


@pytest.mark.parametrize("workers", (-1, 1.5, True))
def test_workers_that_are_no_count_are_refused(workers):
    with pytest.raises(InputError, match=f"devices.workers is {workers}, expected a whole number"):
        Devices(workers=workers)
