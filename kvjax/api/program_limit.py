"""Limits the number of compiled programs of a process: each maps memory regions, whose number is limited."""

from __future__ import annotations

import gc
import logging
from pathlib import Path

import jax

_LIMIT, _MAPS = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
# The share of the regions that a process may map: two threads may be compiling while regions are counted.
_MOST = 0.6
# Regions are counted after this many compilations, because counting takes milliseconds. A program of a small
# decoder maps 100 to 200 regions, so fewer are mapped between two counts than the limit has left.
_EVERY = 64

_compiled = 0


def _count(event: str, duration_secs: float, **_: str | int) -> None:
    global _compiled
    _compiled += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


def forget_if_crowded() -> bool:
    """Drop all compiled programs of a process that maps more than 0.6 of the regions it may map.

    LLVM aborts the process beyond the limit ("Unable to allocate section memory"). A dropped program is
    compiled again when it is next called.

    Returns:
        True if programs were dropped; always False on systems without `/proc/self/maps`.
    """
    try:
        most = int(_LIMIT.read_text())
        mapped = _MAPS.read_bytes().count(b"\n")
    except (OSError, ValueError):
        return False
    if mapped <= _MOST * most:
        return False
    jax.clear_caches()
    gc.collect()
    logging.getLogger(__name__).info(
        "dropped all compiled programs, which mapped %d of %d regions of memory", mapped, most
    )
    return True


def bound_programs() -> bool:
    """`forget_if_crowded` once per 64 compilations; True if programs were dropped.

    `kvjax.prefill` and `kvjax.verify` call it, so a process may try any number of methods and lengths.
    """
    global _compiled
    if _compiled < _EVERY:
        return False
    _compiled = 0
    return forget_if_crowded()
