"""Streaming text: decodes tokens one by one into whole characters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from kvjax.models.clean_spaces import cleans_spaces, settled

# How many of the tokens before one decide on its text.
CONTEXT = 8


class Decoding:
    r"""Decodes ids one by one; incomplete characters, and spaces that may vanish, are held back.

    Decoders may change the text before a token (byte fallback, spaces), so all ids are decoded anew each
    time. before: the ids that the text continues, since some decoders drop the first token's space.

    >>> from kvjax.train.data.byte_tokenizer import byte_tokenizer
    >>> text = Decoding(byte_tokenizer())
    >>> [text.add(byte) for byte in "né".encode() + b"\xe2"], text.rest()
    (['n', '', 'é', ''], '�')
    """

    def __init__(self, tokenizer: Any, before: Sequence[int] = ()):
        self.tokenizer, self.ids, self.shown = tokenizer, [*before][-CONTEXT:], ""
        self.cleans = cleans_spaces(tokenizer)
        self.shown = self._text().rstrip("\ufffd") if self.ids else ""

    def add(self, id: int) -> str:
        """Return the text that a further token adds to the text shown so far."""
        self.ids.append(id)
        text = self._text().rstrip("\ufffd")
        return self._new(settled(text) if self.cleans else text)

    def rest(self) -> str:
        """Return the rest of the text if no token follows."""
        return self._new(self._text())

    def _text(self) -> str:
        return self.tokenizer.decode(self.ids, skip_special_tokens=True)

    def _new(self, text: str) -> str:
        if len(text) < len(self.shown):
            return ""
        # Text that was shown cannot be changed, even if the decoder now reads it differently.
        new = text[len(os.path.commonprefix([text, self.shown])) :]
        self.shown = text
        return new


def widths(tokenizer: Any, before: Sequence[int], ids: Sequence[int]) -> list[int]:
    r"""How many characters each of `ids` adds to the text of those before; zeros without a tokenizer.

    >>> from kvjax.train.data.byte_tokenizer import byte_tokenizer
    >>> widths(byte_tokenizer(), b"a", "né.".encode())
    [1, 1, 0, 1]
    """
    if tokenizer is None:
        return [0] * len(ids)
    every, found = [*before, *ids], []
    for end in range(len(before), len(every)):
        # Decoding all of them for each would take quadratic time.
        near = every[max(0, end - CONTEXT) : end + 1]
        longer, shorter = (tokenizer.decode(part, skip_special_tokens=False) for part in (near, near[:-1]))
        found.append(len(longer) - len(shorter))
    return found
