"""How the processes of one program meet: `start_hosts`, and its error messages if one is missing."""

from __future__ import annotations

import os
import re
import socket
import threading
from typing import Any, NamedTuple

import jax

from kvjax.base.checks import finite_number, whole_number
from kvjax.base.errors import InputError
from kvjax.hosts.watch import joining, watch

AUTO = "auto"
# Seconds without a heartbeat after which JAX ends a program.
_HEARTBEAT = 30
# The last process may take long to finish; processes that are done wait for it.
_SHUTDOWN = 7 * 24 * 3600


class Rendezvous(NamedTuple):
    """Where processes meet: the address of the first with a port, how many there are, and this one's index.

    All are None if JAX is to find them in its environment.
    """

    address: str | None
    processes: int | None
    process: int | None


def start_hosts(
    hosts: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    *,
    wait_seconds: float | int = 300,
) -> None:
    """Join this process with those of other hosts, after which `jax.devices()` lists the devices of all.

    Call it before anything asks JAX for its devices, on every host with the same values except `process`;
    then run the same code everywhere. When a process ends before the others, these end with a line that says
    so and exit code 3.

    Args:
        hosts: "auto" if Slurm, Cloud TPU, GKE, Kubernetes or Open MPI provides the rest, or ADDRESS:PORT of
            the first process. None reads $KVJAX_HOSTS, else "auto".
        processes: how many processes there are; None reads $KVJAX_PROCESSES.
        process: the number of this one, from 0; None reads $KVJAX_PROCESS.
        wait_seconds: how long to wait for the others.

    Raises:
        InputError: for a wrong value, and if not all processes have joined after `wait_seconds`.

    >>> start_hosts("10.0.0.1:1234", processes=2, process=2)
    Traceback (most recent call last):
    kvjax.InputError: process is 2, expected at most 1: how many of the processes come before this one
    """
    place = rendezvous_of(hosts, processes, process)
    finite_number("wait_seconds", wait_seconds, 0.0, open_low=True)
    if not jax.distributed.is_initialized():
        _check_address(place)
        _join(place, wait_seconds)
    if jax.process_count() > 1:
        watch(_found_address().rsplit(":", 1)[0].strip("[]"))


def rendezvous_of(hosts: str | None, processes: int | None, process: int | None) -> Rendezvous:
    """Find where processes meet, from arguments and environment. Raises InputError for a wrong value.

    >>> rendezvous_of("10.0.0.1:1234", 2, 0)
    Rendezvous(address='10.0.0.1:1234', processes=2, process=0)
    """
    hosts = hosts or os.environ.get("KVJAX_HOSTS") or AUTO
    processes = _number("KVJAX_PROCESSES") if processes is None else processes
    process = _number("KVJAX_PROCESS") if process is None else process
    if hosts == AUTO:
        if processes is not None or process is not None:
            raise InputError(
                f"hosts is {AUTO!r}, and processes={processes}, process={process} were given, "
                "expected one of both: leave them out, or give hosts as ADDRESS:PORT of the first process"
            )
        return Rendezvous(None, None, None)
    found = re.fullmatch(r"(\[[0-9a-fA-F:]+\]|[^:\s]+):(\d{1,5})", hosts)
    if found is None or not 0 < int(found[2]) < 2**16:
        raise InputError(
            f"hosts is {hosts!r}, expected {AUTO!r}, or address and port of the first process, as in "
            "10.0.0.1:1234"
        )
    if processes is None or process is None:
        raise InputError(
            f"hosts is {hosts!r}, with processes={processes} and process={process}, expected both: how many "
            "there are, and this one's number from 0"
        )
    processes = whole_number("processes", processes, 1, "processes in all")
    what = "of the processes come before this one"
    return Rendezvous(hosts, processes, whole_number("process", process, 0, what, processes - 1))


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if not text:
        return None
    if not text.isdecimal():
        raise InputError(f"${name} is {text!r}, expected a whole number")
    return int(text)


def _check_address(place: Rendezvous) -> None:
    """Raise InputError if the port is taken, or the name resolves to no machine."""
    if place.address is None:
        return
    host, port = place.address.rsplit(":", 1)
    try:
        if place.process == 0:
            with socket.create_server(("", int(port))):
                return
        socket.getaddrinfo(host.strip("[]"), int(port))
    except OSError as error:
        raise InputError(
            f"the processes cannot meet at {place.address} ({error.strerror or error}): give the address "
            "of process 0, as the other hosts know it, and a free port there"
        ) from error


def _join(place: Rendezvous, wait_seconds: float | int) -> None:
    """Join the other processes. Raises InputError if they do not all join in time."""
    # SIGTERM ends a process: without this, JAX takes it as a notice and continues.
    jax.config.update("jax_enable_preemption_service", False)
    failed: list[Exception] = []

    def join() -> None:
        given: dict[str, Any] = {}
        if place.address is not None:
            given = {"cluster_detection_method": "deactivate"}
        try:
            # JAX aborts a process whose wait times out, so JAX may wait for a week: `_join` waits no longer
            # than `wait_seconds`, and raises an error.
            jax.distributed.initialize(
                place.address, place.processes, place.process, initialization_timeout=_SHUTDOWN,
                heartbeat_timeout_seconds=_HEARTBEAT, shutdown_timeout_seconds=_SHUTDOWN, **given,
            )  # fmt: skip
        except Exception as error:  # whatever JAX raises, the user gets one line
            failed.append(error)

    joining.set()
    thread = threading.Thread(target=join, daemon=True)
    thread.start()
    thread.join(wait_seconds)
    if thread.is_alive():
        raise InputError(_not_all(place, wait_seconds))
    if failed:
        joining.clear()
        raise InputError(_refused(place, failed[0])) from failed[0]


def _not_all(place: Rendezvous, seconds: float | int) -> str:
    address = place.address or _found_address() or "the address that the surroundings name"
    many = place.processes or "all"
    me = "" if place.process is None else f" (this is process {place.process})"
    return (
        f"not all of {many} processes met at {address} within {seconds:g} seconds{me}: start the same "
        "command on every host, each with a number of its own from 0; the address must be that of process 0, "
        "and its port open to all (firewall, proxy)"
    )


def _refused(place: Rendezvous, error: Exception) -> str:
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    if "before" in said:
        return "hosts were started after JAX had looked for its devices: call kvjax.start_hosts first of all"
    if place.address is None:
        return (
            f"no Slurm, Cloud TPU, GKE, Kubernetes or Open MPI says where the other processes are ({said}): "
            "give ADDRESS:PORT of the first process, --processes and --process"
        )
    return f"the processes could not meet at {place.address} ({said}): check address, port and numbers"


def _found_address() -> str:
    from jax._src import distributed

    return distributed.global_state.coordinator_address or ""
