"""Ctrl-C: an interrupted command ends within seconds, wherever it was.

Python handles a signal only between two of its own instructions: a compilation delays it by minutes, and a
callback of jax may swallow the exception. So a thread also listens for the signal, and ends the process
if it does not end by itself.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

# Seconds that an interrupted command has to end by itself.
GRACE = 3.0


class _Part(NamedTuple):
    """A part of a command: a signal to end it sets `came`; the thread sets `spared` once it ignored it."""

    came: threading.Event
    spared: threading.Event


_folders: list[Path] = []
# Parts of the command that end by themselves on a signal; see `ends_a_part`.
_parts: list[_Part] = []
_listening = threading.Event()


def goes_on_in(folder: Path) -> None:
    """Record that the running command can be resumed from `folder`."""
    _folders[:] = [folder]


def folder_to_resume() -> Path | None:
    """Return the folder from which an interrupted run can be resumed; None if it cannot."""
    return _folders[-1] if _folders else None


@contextlib.contextmanager
def ends_a_part() -> Iterator[threading.Event]:
    """Within the block, the first SIGINT sets the event and does nothing else; a second one acts as usual.

    In a thread that receives no signals, or if another handler is installed, nothing sets the event.
    """
    part, handled = _Part(threading.Event(), threading.Event()), threading.Event()
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield part.came
        return

    def handler(number: int, frame: Any) -> None:
        if handled.is_set():
            signal.default_int_handler(number, frame)
        handled.set()
        part.came.set()

    _parts.append(part)
    signal.signal(signal.SIGINT, handler)
    try:
        yield part.came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if handled.is_set() and _listening.is_set():
            # Otherwise the thread would receive the signal after the part is over.
            part.spared.wait(GRACE)
        _parts.remove(part)


class Interrupts:
    """Listens for SIGINT while its block runs in the main thread; `came` says whether one came.

    The first signal raises KeyboardInterrupt, as usual. At a second signal, or if the block has not ended
    `GRACE` seconds later, `end` is called; the process then ends.
    """

    def __init__(self, end: Callable[[], None]):
        self.end, self._heard = end, threading.Event()
        self._ours = threading.current_thread() is threading.main_thread()
        self._ours = self._ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def came(self) -> bool:
        """Whether a signal came. It waits a moment: an error may arrive before the thread gets the signal."""
        return self._ours and self._heard.wait(0.05)

    def __enter__(self) -> Interrupts:
        _folders.clear()
        if self._ours:
            self._far, self._near = socket.socketpair()
            self._near.setblocking(False)
            self._before = signal.set_wakeup_fd(self._near.fileno(), warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, name="kvjax-interrupts", daemon=True)
            self._thread.start()
            _listening.set()
            self._hook, sys.unraisablehook = sys.unraisablehook, self._lost
        return self

    def __exit__(self, *_: object) -> None:
        if self._ours:
            _listening.clear()
            sys.unraisablehook = self._hook
            signal.set_wakeup_fd(self._before)
            self._near.close()
            self._thread.join()
            self._far.close()

    def _listen(self) -> None:
        with contextlib.suppress(TimeoutError):
            while signals := self._far.recv(64):
                count = signals.count(signal.SIGINT)
                if count and _parts and not _parts[-1].spared.is_set():
                    _parts[-1].came.set()
                    _parts[-1].spared.set()
                    count -= 1
                if self._heard.is_set() + count > 1:
                    break
                if count:
                    self._heard.set()
                    self._far.settimeout(GRACE)
            else:
                return
        try:
            self.end()
        finally:
            os._exit(128 + signal.SIGINT)

    def _lost(self, what: Any) -> None:
        """Print nothing for an interrupt that a callback swallowed: the process ends anyway."""
        if not issubclass(what.exc_type, KeyboardInterrupt):
            self._hook(what)
