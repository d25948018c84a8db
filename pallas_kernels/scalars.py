"""What kernels compute and keep in a TPU's scalar core."""

from __future__ import annotations

from typing import Any

# The part of its megabyte that a page table may take, since lengths and other numbers need space too.
TABLE_BYTES = 2**19


def split(x: Any, size: int) -> tuple[Any, Any]:
    """(x // size, x % size) of x >= 0; for a power of two without the instructions for signs.

    >>> split(13, 4), split(13, 5)
    ((3, 1), (2, 3))
    """
    if size & (size - 1) == 0:
        return x >> (size.bit_length() - 1), x & (size - 1)
    return x // size, x % size
