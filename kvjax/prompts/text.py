"""Prompts as token ids, and the kept positions of each document."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

# Ends of sentences, and line breaks.
_ENDS = re.compile(r"(?<=[.!?])\s+|\n+")


class Document(NamedTuple):
    """One text: its token ids, and for every token the index of the sentence in which it begins."""

    ids: Int[np.ndarray, "T"]
    sentences: Int[np.ndarray, "T"]


class PromptText(NamedTuple):
    """Documents, and the question about them; without a question, its ids are empty."""

    documents: tuple[Document, ...]
    question: Int[np.ndarray, "Q"]

    @property
    def tokens(self) -> int:
        """Tokens of all documents together."""
        return sum(len(document.ids) for document in self.documents)


class KeptPositions(NamedTuple):
    """The kept positions of a document, in order. document: its index among the given ones."""

    document: int
    positions: Int[np.ndarray, "n"]


def document(tokenizer: Any, text: str) -> Document:
    """Split a text into tokens and sentences. Sentences end at . ! ? before a space, and at line breaks."""
    found = tokenizer.encode(text, add_special_tokens=False)
    ends = np.array([match.end() for match in _ENDS.finditer(text)], np.int64)
    # A token that includes the space before a word begins with the word; a token of spaces begins at its
    # place.
    begins = [
        start if not text[start:end].strip() else end - len(text[start:end].lstrip())
        for start, end in found.offsets
    ]
    return Document(np.array(found.ids, np.int32), np.searchsorted(ends, np.array(begins, np.int64), "right"))
