"""Timing: one call, the median of several, alternating sides, and the device's own share."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def pin(threads: int, alone: bool = True) -> None:
    """Pin this process to `threads` cores, before libraries start more threads than that.

    alone: with one core, XLA starts no further thread either.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    if threads == 1 and alone:
        os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"


def timed(f: Callable[[], Any]) -> tuple[Any, float]:
    """Time a call, and return (result, wall seconds)."""
    start = time.perf_counter()
    out = f()
    return out, time.perf_counter() - start


def median_seconds(call: Callable[[], Any], rounds: int) -> float:
    """Median wall seconds of `call`, which must not return before its work is done."""
    return statistics.median(timed(call)[1] for _ in range(rounds))


def median_in_turn(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median wall seconds of every side, of rounds in which each is called once.

    Sides alternate, so that other load on the machine affects all of them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, call in sides.items():
            seconds[name].append(timed(call)[1])
    return {name: statistics.median(found) for name, found in seconds.items()}


def device_work(call: Callable[[], Any], calls: int, most: int = 6) -> dict[str, Any]:
    """Milliseconds of GPU work per call of `call`, and those of its longest kernels, by name.

    The rest of the wall time is host overhead. Empty if the device's profile has no streams.
    """
    import jax

    spent: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            call()
        for file in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    for event in line.events if line.name.startswith("Stream") else ():
                        spent[event.name] = spent.get(event.name, 0.0) + event.duration_ns / 1e6 / calls
    if not spent:
        return {}
    longest = sorted(spent, key=spent.__getitem__, reverse=True)[:most]
    return {"device_ms": sum(spent.values()), "kernels_ms": {name: spent[name] for name in longest}}


def read_bandwidth() -> float:
    """Bytes per second of one thread reading 256 MB, the best of five."""
    import numpy as np

    x = np.ones(2**25, np.float64)
    return max(x.nbytes / timed(x.sum)[1] for _ in range(5))
