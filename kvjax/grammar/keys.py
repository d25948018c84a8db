"""The key of a word in dicts of arrays: of observations, traces, merges, probes and codecs."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any


class Key(str):
    """The key of a word: equal to another key if the words are equal, whatever they print.

    As a string it is the word's name, by which a pytree sorts its keys and a file stores them.

    >>> from kvjax.keep.observations.observe import Queries
    >>> Key(Queries(4)) == Key(Queries(4)), Key(Queries(4)) == "Queries(last=4)"
    (True, False)
    """

    __slots__ = ("_hash", "word")
    word: Any

    def __new__(cls, word: Any) -> Key:
        """Return the key of a word."""
        key = super().__new__(cls, name_of(word))
        key.word, key._hash = word, hash(word)
        return key

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Key) and self.word == other.word)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return key_of, (self.word,)


@lru_cache(maxsize=1024)  # comparing one object with itself is cheap, and every step compares keys
def key_of(word: Any) -> str:
    """Return the `Key` of a word, typed as the string that dicts of traces and observations are keyed by.

    >>> from kvjax.keep.observations.observe import Queries
    >>> isinstance(key_of(Queries(4)), Key), str(key_of(Queries(4)))
    (True, 'Queries(last=4)')
    """
    return Key(word)


def name_of(word: Any) -> str:
    """Return the text by which files store a word: its class and fields, whatever its `repr` is.

    It ends with the names of all classes if one is a user's; a class of a user's file is named with the file.

    >>> from kvjax.keep.observations.observe import Queries
    >>> name_of(Queries(4))
    'Queries(last=4)'
    """
    return _text(word) + users_classes(word)


def users_classes(word: Any) -> str:
    """Return what follows in a name if a word contains a user's class: all its classes; else nothing."""
    kinds = list(_kinds(word))
    return "" if all(map(_is_ours, kinds)) else f" of {', '.join(map(_whole_name, kinds))}"


def _text(word: Any) -> str:
    if type(word) is tuple:
        return f"({', '.join(map(_text, word))}{',' if len(word) == 1 else ''})"
    if isinstance(word, frozenset):
        return f"frozenset({{{', '.join(sorted(map(_text, word)))}}})" if word else "frozenset()"
    if not _compares_fields(word):
        return repr(word)
    fields = (field.name for field in dataclasses.fields(word) if field.compare and field.init)
    found = ", ".join(f"{name}={_text(getattr(word, name))}" for name in fields)
    return f"{type(word).__qualname__}({found})"


def _compares_fields(word: Any) -> bool:
    """Return whether a word is a dataclass whose values are equal if their fields are."""
    params = getattr(word, "__dataclass_params__", None)
    return params is not None and params.eq and not isinstance(word, type)


def _kinds(word: Any) -> Iterator[type]:
    """Yield the classes of a word and of all its parts, in the order of its fields."""
    if isinstance(word, tuple | frozenset):
        for part in sorted(word, key=name_of) if isinstance(word, frozenset) else word:
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
