"""Messages between processes: small values as JSON, through JAX's coordination service.

All processes must call these functions in the same order. A single process only receives its own values.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import jax

from kvjax.base.errors import InputError

# Characters of one message; the service's limit is that of gRPC.
_PIECE = 2**20
_DAYS = 7 * 24 * 3600 * 1000
_numbers = itertools.count()


def is_first() -> bool:
    """Whether this process prints and writes reports: the first of several, or the only one.

    >>> is_first()
    True
    """
    return number_of() == 0


def number_of() -> int:
    """Return the index of the calling process, from 0."""
    return jax.process_index() if jax.distributed.is_initialized() else 0


def count() -> int:
    """How many processes run this program.

    >>> count()
    1
    """
    return jax.process_count() if jax.distributed.is_initialized() else 1


def gathered(value: Any) -> list[Any]:
    """Gather the values of all processes, in their order; values must be JSON-serialisable.

    >>> gathered({"cells": 3})
    [{'cells': 3}]
    """
    if count() == 1:
        return [value]
    client, mine, all_of = service(), f"kvjax/{next(_numbers)}", range(count())
    _say(client, f"{mine}/{number_of()}", value)
    found = [_hear(client, f"{mine}/{i}") for i in all_of]
    client.wait_at_barrier(mine, _DAYS)
    client.key_value_delete(f"{mine}/{number_of()}")
    return found


def by_first(f: Callable[[], Any]) -> Any:
    """Return the result of f, which only the first process calls; it must be JSON-serialisable.

    Raises the InputError that f raises in all processes.

    >>> by_first(lambda: "kvjax-results/1")
    'kvjax-results/1'
    """
    if count() == 1:
        return f()
    said = None
    if is_first():
        try:
            said = {"value": f()}
        except InputError as error:
            said = {"error": str(error)}
    heard = gathered(said)[0]
    if "error" in heard:
        raise InputError(heard["error"])
    return heard["value"]


def check_same(what: str, value: Any) -> None:
    """Raise InputError if processes differ in a value that must be the same in all of them.

    >>> check_same("the texts", "4f1d")
    """
    said = gathered(value)
    other = next((i for i, x in enumerate(said) if x != said[0]), None)
    if other is not None:
        raise InputError(
            f"{what} differ between hosts: process 0 has {said[0]}, process {other} has {said[other]}: give "
            "all the same files and settings"
        )


def wait_for_all() -> None:
    """Wait until every process has called it."""
    if count() > 1:
        service().wait_at_barrier(f"kvjax/{next(_numbers)}", _DAYS)


def service() -> Any:
    """Return the client of JAX's coordination service, which Orbax uses, too."""
    from jax._src import distributed

    return distributed.global_state.client


def _say(client: Any, key: str, value: Any) -> None:
    text = json.dumps(value)
    pieces = [text[at : at + _PIECE] for at in range(0, len(text), _PIECE)]
    for i, piece in enumerate(pieces):
        client.key_value_set(f"{key}/{i}", piece)
    client.key_value_set(f"{key}/pieces", str(len(pieces)))


def _hear(client: Any, key: str) -> Any:
    pieces = int(client.blocking_key_value_get(f"{key}/pieces", _DAYS))
    return json.loads("".join(client.blocking_key_value_get(f"{key}/{i}", _DAYS) for i in range(pieces)))
