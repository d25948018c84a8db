"""The words of a method by the texts under which files of this and earlier versions store them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from kvjax.base.errors import InputError
from kvjax.grammar.keys import name_of, users_classes
from kvjax.grammar.sentence import read_after
from kvjax.methods.constructors import constructed_word
from kvjax.methods.renamed import with_new_names

# Properties that name further words.
_NAMING = ("needs", "traces", "mark", "marks", "learns", "in_steps")


def words_of(method: Any) -> frozenset[Any]:
    """Return every word of a method, those that its words name in properties included."""
    found: set[Any] = set()
    for one in (method, *(() if method is None else method.layers)):
        reads = (
            () if one is None or one.keep is None or one.read is None else (read_after(one.keep, one.read),)
        )
        for word in (one, *reads):
            _gather(word, found)
    return frozenset(found)


def _gather(word: Any, found: set[Any]) -> None:
    for one in _parts(word):
        if one not in found:
            found.add(one)
            for field in dataclasses.fields(one):
                _gather(getattr(one, field.name, None), found)
            for name in _NAMING:
                _gather(getattr(one, name, None), found)


def _parts(word: Any) -> Iterator[Any]:
    """Yield the words among a value and the items of its tuples and sets."""
    if isinstance(word, tuple | frozenset):
        for part in word:
            yield from _parts(part)
    elif dataclasses.is_dataclass(word) and not isinstance(word, type):
        yield word


class SavedWords:
    """Words, found by their texts in files."""

    def __init__(self, words: Iterable[Any]):
        """Take each word once, by its name and by what earlier versions wrote for it."""
        self._words = frozenset(words)
        self._older = _unambiguous((_older_name(word), word) for word in self._words)
        self._named = _unambiguous((name_of(word), word) for word in self._words)

    def find(self, text: str) -> Any | None:
        """Return the word that a file names by `text`; None if there is none or the text fits several.

        Text of the library's words is also built, so that fields with a default may be added to them.
        """
        text = with_new_names(text)
        for names in (self._named, self._older):
            if text in names:
                return names[text]
        try:
            word = constructed_word(text)
        except (InputError, ValueError):
            return None
        return next((one for one in self._words if one == word), None)


def check_names(words: Iterable[Any]) -> None:
    """Raise InputError if two different words have the same name, so that a file would confuse them."""
    words = frozenset(words)
    for name, word in sorted(_unambiguous((name_of(one), one) for one in words).items(), key=lambda x: x[0]):
        if word is None:
            raise InputError(
                f"two words of the method differ and are both {name}: give them fields that differ"
            )


def _older_name(word: Any) -> str:
    """Write a word as its `repr`, which earlier versions wrote."""
    return f"{word!r}{users_classes(word)}"


def _unambiguous(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Words by text; None for the texts of several words."""
    found: dict[str, Any] = {}
    for text, word in pairs:
        found[text] = None if text in found and found[text] != word else word
    return found
