"""Restore tokens: learned tokens that read a prompt before slots of it leave, and whose own slots stay."""

from __future__ import annotations

import dataclasses

from kvjax.grammar.fitted import Fitted, ModelSizes, check_sizes
from kvjax.keep.prompts.lora import check_lora


@dataclasses.dataclass(frozen=True)
class RestoreTokens:
    """`tokens` learned tokens, read once behind a prompt over all of its slots, stay in place of as many.

    They are projected by more weights (`kvjax.steps.prefilling.lora`) and see the prompt and those of them
    that stand before; the scores of the prompt's own slots know nothing of them (arXiv:2608.01247). They
    stand at the positions behind the prompt, and what follows stands behind them. In each list they count
    among the slots of its budget, and no score lets them leave.

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
        return f"{self.tokens} learned tokens read the whole prompt before any slot leaves, and stay."

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model, or of other restore tokens."""
        check_sizes(self, "restore tokens", "one, tokens, width", "memory", (1, self.tokens, model.width))
        check_lora(self, model)
