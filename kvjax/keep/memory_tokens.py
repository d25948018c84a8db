"""Memory tokens: behind every chunk of a prompt some learned tokens are read, whose slots alone stay."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.fitted import Fitted, ModelSizes, check_sizes
from kvjax.keep.lora import check_lora


@dataclasses.dataclass(frozen=True)
class MemoryTokens:
    """Behind every `every` tokens of a prompt `tokens` learned ones are read, which alone stay.

    A chunk sees the memory of the chunks before it and itself; with None the whole prompt is one. Memory
    tokens stand behind their chunk while it is read, and are projected by more weights
    (`kvjax.steps.marking`). What is then stored is turned anew, to positions without gaps behind those of
    earlier turns; so the cache's length and positions are those of a text of memory tokens. The last token of
    a prompt is read behind them, sees them and what the cache held, and stays, because it answers. mean: the
    memory is the mean over chunks of what their memory tokens leave, and not all of it.

    fitted: "memory" [1, tokens, D], their embeddings; "q_down" [L, D, R] and "q_up" [L, R, N H], and likewise
    of k, v and o.

    ValueError for numbers below 1.

    >>> word = MemoryTokens(2, every=8)
    >>> word.most(33), word.most(34), MemoryTokens(2, every=8, mean=True).most(33), word.most(1)
    (9, 11, 3, 1)
    """

    tokens: int
    every: int | None = None
    mean: bool = False
    by: str = "ccm"
    fitted: Fitted | None = None
    turns = True
    reads = "The prompt is read chunk by chunk, and what learned tokens behind each hold alone stays."

    def __post_init__(self):
        for name in ("tokens", "every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is a number of tokens, at least 1, got {value!r}")

    @property
    def says(self) -> str:
        where = "a whole prompt" if self.every is None else f"every {self.every} tokens of a prompt"
        held = ", of which the mean over chunks stays" if self.mean else ", which alone stay"
        return f"Behind {where} {self.tokens} learned tokens are read{held}."

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model, or of other memory tokens."""
        check_sizes(self, "memory tokens", "one, tokens, width", "memory", (1, self.tokens, model.width))
        check_lora(self, model)

    def chunk(self, tokens: int) -> int:
        """Of how many tokens the chunks of a prompt of at most `tokens` tokens are."""
        return max(1, tokens - 1 if self.every is None else min(self.every, tokens - 1))

    def chunks(self, tokens: int) -> int:
        """How many chunks that prompt has; its last token is in none."""
        return -(-(tokens - 1) // self.chunk(tokens))

    def slots(self, chunks: int) -> int:
        """How many slots the memory of so many chunks is."""
        return self.tokens * (min(chunks, 1) if self.mean else chunks)

    def most(self, tokens: int) -> int:
        """How many slots a prompt of at most `tokens` tokens leaves."""
        return self.slots(self.chunks(tokens)) + 1

    def count(self, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
        """The same, per row of so many tokens; 0 of rows without any."""
        text = jnp.maximum(tokens - 1, 0)
        chunks = jnp.minimum(text, 1) if self.every is None or self.mean else -(-text // self.every)
        return self.tokens * chunks + jnp.minimum(tokens, 1)
