"""Liveness: a connection from every process to the first, which breaks when a process is gone.

Without it, the remaining processes would wait in a collective for ever, or be aborted by JAX half a
minute later. If no connection can be made, only JAX's own heartbeat is left.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import time
from types import TracebackType
from typing import NoReturn

from kvjax.hosts.messages import count, is_first, number_of, service

# The exit code of a process that ends because another one has ended.
LOST = 3
# Seconds in which a process may report its own error after another process has ended with one.
GRACE = 3.0
_KEY, _CONNECT = "kvjax/watch", 10
_links: dict[int, socket.socket] = {}
# Set from when this process looks for the others: it then exits through `leave`, unless it ends well.
joining = threading.Event()
_watching, _leaving, _gone = threading.Event(), threading.Event(), threading.Event()


def watch(address: str) -> None:
    """From here on this process ends, with a message, when another does. address: of the first process."""
    if is_first():
        server = socket.create_server(("", 0), backlog=count())
        service().key_value_set(_KEY, str(server.getsockname()[1]))
        threading.Thread(target=_accept, args=(server,), daemon=True).start()
    else:
        # The first process publishes its port once its devices are ready, which may take a while.
        port = int(service().blocking_key_value_get(_KEY, 60_000))
        try:
            link = socket.create_connection((address, port), timeout=_CONNECT)
        except OSError:
            return
        link.settimeout(None)
        link.sendall(f"{number_of()}\n".encode())
        threading.Thread(target=_listen, args=(link, 0), daemon=True).start()
    _watching.set()
    atexit.register(_say, "done", number_of())
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A collective fails at once if its partner is gone; the other thread is about to say which one that
        # is.
        if issubclass(kind, RuntimeError) and _gone.wait(GRACE):
            threading.Event().wait()
        before(kind, error, trace)
        if threading.current_thread() is threading.main_thread():
            leave(1)

    sys.excepthook = hook


def leave(code: int) -> NoReturn:
    """End this process at once, after telling the others, if it joined them, that it failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    if not _watching.is_set():
        # Threads that still wait for the others cannot be stopped otherwise.
        os._exit(code)
    _leaving.set()
    _say("failed", number_of())
    if is_first():
        # JAX's service ends with this process, and would abort the others before they print their message.
        time.sleep(2 * GRACE)
    os._exit(code)


def _accept(server: socket.socket) -> None:
    for _ in range(count() - 1):
        link, _ = server.accept()
        threading.Thread(target=_listen, args=(link, None), daemon=True).start()
    server.close()


def _listen(link: socket.socket, peer: int | None) -> None:
    """End this process when the peer of a link ends, or report that another one has."""
    lines = link.makefile("r", encoding="utf-8")
    try:
        if peer is None:
            peer = int(lines.readline())
        _links[peer] = link
        said = {"done": False}
        for line in lines:
            word, who = line.split()
            if word == "done":
                said["done"] = True
            else:
                _end(word, int(who))
        done = said["done"]
    except (OSError, ValueError):
        done = False
    if not done and peer is not None:
        _end("gone", peer)


def _end(word: str, who: int) -> None:
    """Tell the others, then end this process with a line that says which process ended first."""
    if _gone.is_set() or _leaving.is_set():
        return
    _gone.set()
    if is_first():
        _say(word, who)
    if word == "failed":
        time.sleep(GRACE)
        if _leaving.is_set():
            return
        why = "on an error, which it has printed"
    else:
        why = "without a word: it was killed, ran out of memory, or lost its machine or network"
    line = (
        f"kvjax: error: process {who} of {count()} has ended {why}; so process {number_of()} ends, "
        "too: start all of them again, with --resume or from the last checkpoint where there is one\n"
    )
    os.write(2, line.encode())
    if is_first() and word != "gone":
        time.sleep(GRACE)
    os._exit(LOST)


def _say(word: str, who: int) -> None:
    for link in list(_links.values()):
        try:
            link.sendall(f"{word} {who}\n".encode())
        except OSError:
            pass
