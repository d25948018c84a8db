"""Stop strings: texts that end a row once it has generated them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool, Int

from kvjax.base.errors import InputError
from kvjax.models.clean_spaces import uncleaned
from kvjax.models.model import Model


class StopStrings:
    """Which rows have generated one of `strings`; called with every row's next token.

    The generated tokens are decoded as one text, with special tokens and spaces, so a string may begin and
    end inside tokens. Raises InputError if the model has no tokenizer, or a string is empty.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> ends = StopStrings(model, ["4 52"], rows=1)
    >>> [bool(ends(np.array([id]))[0]) for id in model.tokenizer.encode("17 4 52 <.>").ids[:3]]
    [False, False, True]
    """

    def __init__(self, model: Model, strings: Sequence[str], rows: int):
        if isinstance(strings, str) or not all(isinstance(s, str) and s for s in strings):
            raise InputError(f"stop_strings is {strings!r}, expected a list of texts that are not empty")
        if model.tokenizer is None:
            raise InputError(f"{model.name} has no tokenizer, so it writes no text: give stop= token ids")
        self.decode, self.strings = uncleaned(model.tokenizer), tuple(strings)
        self.written: list[list[int]] = [[] for _ in range(rows)]

    def __call__(self, shown: Int[np.ndarray, "B"]) -> Bool[np.ndarray, "B"]:
        for row, token in zip(self.written, shown.tolist(), strict=True):
            if token >= 0:
                row.append(token)
        texts = [self.decode(row) for row in self.written]
        return np.array([any(s in text for s in self.strings) for text in texts])
