"""How many compiled programs a process may hold: each maps regions of memory, and their number is limited."""

from __future__ import annotations

import gc
from pathlib import Path

import jax

_LIMIT, _MAPS = Path("/proc/sys/vm/max_map_count"), Path("/proc/self/maps")
# Of the regions that a process may map, as a share: two threads may be compiling while others are counted.
_MOST = 0.6


def forget_if_crowded() -> bool:
    """Drops all compiled programs where this process is about to map as many regions as it may.

    LLVM aborts the process beyond that. What is dropped is compiled again when it is next called. False where
    nothing was dropped, and where a system does not say what is mapped.
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
    return True
