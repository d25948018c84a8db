"""Streaming text: decodes tokens one by one into whole characters."""

from __future__ import annotations

import os
from typing import Any

from kvjax.models.clean_spaces import cleans_spaces, settled


class Decoding:
    r"""Decodes ids one by one; incomplete characters, and spaces that may vanish, are held back.

    Decoders may change the text before a token (byte fallback, spaces), so all ids are decoded anew each
    time.

    >>> from kvjax.train.data.byte_tokenizer import byte_tokenizer
    >>> text = Decoding(byte_tokenizer())
    >>> [text.add(byte) for byte in "né".encode() + b"\xe2"], text.rest()
    (['n', '', 'é', ''], '�')
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.ids, self.shown = tokenizer, [], ""
        self.cleans = cleans_spaces(tokenizer)

    def add(self, id: int) -> str:
        """The text that a further token adds to the text shown so far."""
        self.ids.append(id)
        text = self._text().rstrip("\ufffd")
        return self._new(settled(text) if self.cleans else text)

    def rest(self) -> str:
        """The rest of the text if no token follows."""
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
