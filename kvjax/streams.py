"""Standard output and error as commands write to them: whatever they are, and whatever a text holds."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

# What acts on a terminal instead of standing in a text: an escape may set its title, or write its clipboard.
_ACTS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def escaped(text: str) -> str:
    """A text whose control characters are written out, lines and tabs aside.

    >>> print(escaped("\\x1b[31mred"))
    \\x1b[31mred
    """
    return text.translate(_ACTS)


@contextlib.contextmanager
def printable() -> Iterator[None]:
    """Standard output and error take every character: one that their encoding lacks is written as \\\\u2500.

    One that is closed takes all and shows nothing.
    """
    with contextlib.ExitStack() as stack:
        for name in ("stdout", "stderr"):
            stream: Any = getattr(sys, name)
            if stream is None:
                setattr(sys, name, stack.enter_context(open(os.devnull, "w", encoding="utf-8")))
                stack.callback(setattr, sys, name, None)
            elif hasattr(stream, "reconfigure"):
                stack.callback(_reconfigure, stream, stream.errors)
                stream.reconfigure(errors="backslashreplace")
        yield


def _reconfigure(stream: Any, errors: str | None) -> None:
    # It flushes, which a stream that is gone refuses.
    with contextlib.suppress(OSError, ValueError):
        stream.reconfigure(errors=errors)


def silence(stream: Any) -> None:
    """Sends what is still buffered nowhere: its reader is gone, and Python would fail to write it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
