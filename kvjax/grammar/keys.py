"""The key of a word in dicts of arrays: of observations, traces, merges, probes and codecs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any


def key_of(word: Any) -> str:
    """The repr of a word; if it contains a user's classes, followed by the names of all its classes.

    Names distinguish classes that print alike; a class of a user's file is named with the file. A string,
    unlike the word, can be sorted among the keys of a pytree and written to a file.

    >>> from kvjax.keep.observations.observe import Queries
    >>> key_of(Queries(4))
    'Queries(last=4)'
    """
    kinds = list(_kinds(word))
    if all(_is_ours(kind) for kind in kinds):
        return repr(word)
    return f"{word!r} of {', '.join(map(_whole_name, kinds))}"


def alike(words: Iterable[Any]) -> str:
    """Why words of one method would overwrite each other's arrays; empty if no two have the same key."""
    found: dict[str, Any] = {}
    for word in words:
        if found.setdefault(key_of(word), word) != word:
            return (
                f"two of its words differ and print the same, {word!r}: give their classes other names, or "
                "show in `repr` what distinguishes them"
            )
    return ""


def _kinds(word: Any) -> Iterator[type]:
    """The classes of a word and of all its parts, in the order of its fields."""
    if isinstance(word, tuple | frozenset):
        for part in sorted(word, key=key_of) if isinstance(word, frozenset) else word:
            yield from _kinds(part)
    elif dataclasses.is_dataclass(word) and not isinstance(word, type):
        yield type(word)
        for field in dataclasses.fields(word):
            yield from _kinds(getattr(word, field.name, None))


def _is_ours(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "kvjax"


def _whole_name(kind: type) -> str:
    if _is_ours(kind):
        return kind.__qualname__
    module = sys.modules.get(kind.__module__)
    file = getattr(module, "__file__", None)
    # A user's method file is imported under a name that no other process knows (`kvjax.methods.user`).
    where = Path(file).name if file and kind.__module__.startswith("kvjax_user_") else kind.__module__
    return f"{where}:{kind.__qualname__}"
