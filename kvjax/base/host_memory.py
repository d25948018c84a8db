"""Host memory that a process has freed and still holds."""

from __future__ import annotations

import ctypes
import sys


def trim() -> bool:
    """Returns freed memory to the system; True where there was any.

    glibc keeps what arrays below 32 MB leave, in pieces between those that live, and a long run over batches
    of different shapes comes to hold several times what it uses. Other systems return it by themselves.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        return bool(ctypes.CDLL(None).malloc_trim(0))
    except (OSError, AttributeError):  # a C library that has none
        return False
