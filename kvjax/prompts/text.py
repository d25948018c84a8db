"""What is compressed, as token ids, and what is left of it."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

# Ends of sentences, and line breaks.
_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")


class Document(NamedTuple):
    """One text: its token ids, and of every token the number of the sentence in which it begins."""

    ids: Int[np.ndarray, "T"]
    sentences: Int[np.ndarray, "T"]


class Prompt(NamedTuple):
    """Documents, and the question about them; no ids where none is given."""

    documents: tuple[Document, ...]
    question: Int[np.ndarray, "Q"]

    @property
    def tokens(self) -> int:
        """Tokens of all documents together."""
        return sum(len(document.ids) for document in self.documents)


class Kept(NamedTuple):
    """The positions that stay of a document, in order. document: its number among those given."""

    document: int
    positions: Int[np.ndarray, "n"]


def document(tokenizer: Any, text: str) -> Document:
    """A text's tokens and sentences. Sentences end at . ! ? before a space, and at line breaks."""
    found = tokenizer.encode(text, add_special_tokens=False)
    ends = np.array([match.end() for match in _ENDS.finditer(text)], np.int64)
    # A token that holds the space before a word begins with the word; a space of its own where it stands.
    begins = [
        start if not text[start:end].strip() else end - len(text[start:end].lstrip())
        for start, end in found.offsets
    ]
    return Document(np.array(found.ids, np.int32), np.searchsorted(ends, np.array(begins, np.int64), "right"))
