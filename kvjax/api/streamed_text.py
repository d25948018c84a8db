"""Text of tokens as they come, in whole characters."""

from __future__ import annotations

import os
from typing import Any

from kvjax.models.clean_spaces import cleans_spaces, settled


class Decoding:
    r"""Ids to text as they come: what is no complete character yet, or a space that may go, is held back.

    Decoders change what stands before a token (byte fallback, spaces), so all ids are decoded anew each time.

    >>> from kvjax.train.data.byte_tokenizer import byte_tokenizer
    >>> text = Decoding(byte_tokenizer())
    >>> [text.add(byte) for byte in "né".encode() + b"\xe2"], text.rest()
    (['n', '', 'é', ''], '�')
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer, self.ids, self.shown = tokenizer, [], ""
        self.cleans = cleans_spaces(tokenizer)

    def add(self, id: int) -> str:
        """What a further token adds to the text that was shown."""
        self.ids.append(id)
        text = self._text().rstrip("\ufffd")
        return self._new(settled(text) if self.cleans else text)

    def rest(self) -> str:
        """What is left of the text where no token follows."""
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
