"""Host memory that a process has freed but not returned to the system."""

from __future__ import annotations

import ctypes
import sys


def trim() -> bool:
    """Return freed memory to the system; True if there was any.

    glibc keeps the memory of arrays below 32 MB, fragmented between live ones, so that a long run over
    batches of different shapes comes to hold several times what it uses. Other systems return it by
    themselves.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):  # a C library without malloc_trim
        return False
