"""Restore tokens: learned tokens that attend to a prompt before it is compressed; their own slots stay."""

from __future__ import annotations

import dataclasses

from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.keep.prompts.lora import check_lora


@dataclasses.dataclass(frozen=True)
class RestoreTokens(FittedWord):
    """`tokens` learned tokens, read once after a prompt with all its slots, that replace as many slots.

    They are projected with additional weights (`kvjax.steps.prefilling.lora`) and attend to the prompt and to
    earlier restore tokens; they do not change the scores of the prompt's slots (arXiv:2608.01247). They have
    the positions after the prompt, and later tokens follow them. In each KV head they count against the
    budget and are never evicted.

    fitted: "memory" [1, tokens, D], their embeddings; "q_down" [L, D, R] and "q_up" [L, R, N H], and likewise
    of k, v and o.

    ValueError for a number below 1.

    >>> RestoreTokens(8).tokens
    8
    """

    tokens: int
    fitted: Fitted | None = None
    by = "restorekv"

    def __post_init__(self):
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ValueError(f"tokens is a number of restore tokens, at least 1, got {self.tokens!r}")

    @property
    def says(self) -> str:
        return f"{self.tokens} learned tokens read the whole prompt before any slot is evicted, and stay."

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the arrays do not fit the model's sizes or the number of restore tokens."""
        check_sizes(self, "restore tokens", "one, tokens, width", "memory", (1, self.tokens, model.width))
        check_lora(self, model)
