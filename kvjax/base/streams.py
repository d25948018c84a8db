"""Standard output and error of commands: no character, and no closed stream, makes a write fail."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

# Control characters: on a terminal, an escape sequence may set the title or write to the clipboard.
_ACTS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def escaped(text: str) -> str:
    r"""Escape control characters of a text, except newlines and tabs.

    >>> print(escaped("\x1b[31mred"))
    \x1b[31mred
    """
    return text.translate(_ACTS)


@contextlib.contextmanager
def printable() -> Iterator[None]:
    r"""Let standard output and error accept every character: one their encoding lacks is written as \\u2500.

    A stream that is missing (None) is replaced by one that discards everything.
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
    # reconfigure flushes, which fails if the reader is gone.
    with contextlib.suppress(OSError, ValueError):
        stream.reconfigure(errors=errors)


def silence(stream: Any) -> None:
    """Discard what is still buffered: the reader is gone, and Python would fail to write it at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
