"""The texts and words of the tasks: shipped files, or a haystack of the user's."""

from __future__ import annotations

import functools
import hashlib
import re
from pathlib import Path
from typing import NamedTuple

from kvjax.base.errors import InputError

DATA = Path(__file__).parent / "data"
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
_ENDS = re.compile(r"(?:(?<=[.!?])|(?<=[.!?]['\")”’]))\s+(?=[A-Z`'\"(“‘])")


class Haystack(NamedTuple):
    """A text as words, and the name by which a comparison lists it as a source."""

    words: tuple[str, ...]
    name: str

    def first(self, count: int) -> str:
        """Take the first `count` words; a text that is too short is repeated."""
        again = -(-count // len(self.words))
        return " ".join((self.words * again)[:count])


def sentences(text: str) -> list[str]:
    """Sentences of a text.

    Deviation: RULER splits with nltk's trained model; here a sentence ends at a full stop before a capital.

    >>> sentences("It rained. 'Oh!' said Alice. Then all was well.")
    ['It rained.', "'Oh!' said Alice.", 'Then all was well.']
    """
    return _ENDS.split(text.strip())


def haystack(path: str | None = None) -> Haystack:
    """Alice in Wonderland (`data/README.md`), or a text file; InputError if it has no words."""
    file = DATA / "alice29.txt" if path is None else Path(path)
    try:
        raw = file.read_bytes()
        words = tuple(raw.decode("utf-8-sig").split())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"the haystack {file} cannot be read ({error}): expected a text in UTF-8") from error
    if not words:
        raise InputError(f"the haystack {file} has no words, expected a text in UTF-8: give another")
    return Haystack(words, f"{file.name}:{hashlib.sha256(raw).hexdigest()[:16]}")


@functools.cache
def words_of(kind: str) -> tuple[str, ...]:
    """Return the sorted "noun", "adjective" or "verb" words of wonderwords, or those of all three ("all")."""
    if kind == "all":
        return tuple(sorted({w for one in ("noun", "adjective", "verb") for w in words_of(one)}))
    text = (DATA / f"{kind}list.txt").read_text(encoding="utf-8")
    return tuple(sorted({line.rstrip() for line in text.splitlines()}))
