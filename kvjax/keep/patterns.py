"""Patterns: slots that stay because of their position, whatever their score."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jaxtyping import Bool, Int

from kvjax.base.kind import tell_shares_from_numbers
from kvjax.grammar.kinds import Numbers, Pattern


@dataclasses.dataclass(frozen=True)
class Sink(Pattern):
    """The first `tokens` tokens of a row (attention sinks, arXiv:2309.17453).

    Args:
        tokens: how many.

    >>> import numpy as np
    >>> Sink(2)(np.arange(4)[None, None], np.array([4]), np.array([2])).tolist()
    [[[True, True, False, False]]]
    """

    tokens: int = 4

    def __call__(
        self, pos: Int[Numbers, "B K S"], length: Int[Numbers, "B"], n: Int[Numbers, "B"]
    ) -> Bool[Numbers, "B K S"]:
        return (pos >= 0) & (pos < self.tokens)


@dataclasses.dataclass(frozen=True)
class Recent(Pattern):
    """The newest tokens: how many (int), or which share of the budget (float in (0, 1)).

    Args:
        tokens: how many, or the share of the budget.

    >>> import numpy as np
    >>> Recent(1)(np.arange(4)[None, None], np.array([4]), np.array([2])).tolist()
    [[[False, False, False, True]]]
    """

    tokens: int | float
    newest: ClassVar[bool] = True

    @property
    def says(self) -> str:
        many = (
            f"{self.tokens} tokens" if isinstance(self.tokens, int) else f"share {self.tokens} of the budget"
        )
        return f"The newest {many}."

    def __call__(
        self, pos: Int[Numbers, "B K S"], length: Int[Numbers, "B"], n: Int[Numbers, "B"]
    ) -> Bool[Numbers, "B K S"]:
        if isinstance(self.tokens, int):
            return pos >= (length - self.tokens)[:, None, None]
        share = (n * round(self.tokens * 1000)) // 1000
        return pos >= (length - share)[:, None, None]


@dataclasses.dataclass(frozen=True)
class QuestionWindow(Recent):
    """The newest tokens as a question: unlike a `Recent` window, they may take up the whole budget."""

    newest = False


tell_shares_from_numbers("tokens", Recent, QuestionWindow)
