"""Memory tokens, read after every chunk of a prompt: only they and the prompt's last token are stored."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.grammar.facts import Fact, Reasons
from kvjax.grammar.fitted import Fitted, FittedWord, ModelSizes, check_sizes
from kvjax.grammar.prompt_edits import Rereading
from kvjax.keep.prompts.lora import check_lora


@dataclasses.dataclass(frozen=True)
class MemoryTokens(Rereading, FittedWord):
    """Reads `tokens` learned tokens after every `every` of a prompt; only they and its last token are stored.

    A chunk attends to itself and to the memory of earlier chunks; if `every` is None, the prompt is one
    chunk. While a chunk is read, its memory tokens have the positions after it; they are projected with
    additional weights (`kvjax.steps.prefilling.lora`). Stored slots are then rotated to consecutive positions
    after those of earlier turns, so the cache's length and positions are those of a text of memory tokens.
    The last token of a prompt is read after all memory tokens, attends to them and to earlier slots, and is
    stored, too, because the answer is predicted from it.

    mean: stores the mean of the chunks' memories instead of all of them.

    fitted: "memory" [1, tokens, D], their embeddings; "q_down" [L, D, R] and "q_up" [L, R, N H], and likewise
    of k, v and o.

    Raises ValueError for numbers below 1.

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
    marks = True
    # Whether the memory tokens of a chunk attend to later ones, too.
    mutual = False
    reads = "The prompt is read chunk by chunk, and what learned tokens after each hold alone stays."

    @property
    def requires(self) -> Reasons:
        return {
            Fact.GIVEN_WEIGHTS: "reads with weights beside the model's",
            Fact.DENSE_PROMPTS: "reads a prompt in chunks of its own",
            Fact.ROTATED_KEYS: "rotates memory tokens to the positions where they are stored",
        }

    @property
    def breaks(self) -> Reasons:
        own = "selects the slots of a prompt itself"
        alone = dict.fromkeys((Fact.OBSERVED, Fact.ALL_TOKENS, Fact.WHOLE_PROMPTS), own)
        return {**alone, Fact.PLAIN_READING: "reads tokens with weights beside the model's"}

    def __post_init__(self):
        for name in ("tokens", "every"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is a number of tokens, at least 1, got {value!r}")

    @property
    def says(self) -> str:
        where = "a whole prompt" if self.every is None else f"every {self.every} tokens of a prompt"
        held = ", of which the mean over chunks stays" if self.mean else ", which alone stay"
        return f"After {where}, {self.tokens} learned tokens are read{held}."

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the arrays do not fit the model's sizes or the number of memory tokens."""
        check_sizes(self, "memory tokens", "one, tokens, width", "memory", (1, self.tokens, model.width))
        check_lora(self, model)

    def chunk(self, tokens: int) -> int:
        """Return the chunk length for prompts of at most `tokens` tokens."""
        return max(1, tokens - 1 if self.every is None else min(self.every, tokens - 1))

    def chunks(self, tokens: int) -> int:
        """How many chunks a prompt of `tokens` tokens has; its last token is in none."""
        return -(-(tokens - 1) // self.chunk(tokens))

    def of(self, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """How many memory tokens follow a chunk of `tokens` tokens."""
        return self.tokens * jnp.minimum(tokens, 1)

    def stands_for(self, tokens: Int[Array, "B"]) -> Int[Array, "B M"]:
        """Which of a chunk's tokens each of its memory tokens represents, evenly spaced."""
        ends = jnp.arange(1, self.tokens + 1, dtype=jnp.int32)
        return jnp.maximum(-(-ends[None] * tokens[:, None] // self.tokens), 1) - 1

    def before(self, number: Int[Array, ""]) -> Int[Array, ""]:
        """Return the position in its turn at which chunk `number` begins."""
        return self.tokens * (jnp.minimum(number, 1) if self.mean else number)

    def stands(self, number: Int[Array, ""], tokens: Int[Array, "B"]) -> Int[Array, "B M"]:
        """Return the positions in its turn of the memory of a chunk of `tokens` tokens."""
        first = jnp.zeros_like(number) if self.mean else self.before(number)
        at = first + jnp.arange(self.tokens, dtype=jnp.int32)
        return jnp.broadcast_to(at, (len(tokens), self.tokens))

    def after(self, text: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return the position in its turn of the token that follows a text of `text` tokens."""
        return self.count(text + 1) - 1

    def slots(self, chunks: int) -> int:
        """How many slots the memory of `chunks` chunks takes."""
        return self.tokens * (min(chunks, 1) if self.mean else chunks)

    def most(self, tokens: int) -> int:
        """Return the largest number of slots in which a prompt of at most `tokens` tokens is stored."""
        return self.slots(self.chunks(tokens)) + 1

    def count(self, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return how many slots each row's prompt of `tokens` tokens takes; 0 for rows without tokens."""
        text = jnp.maximum(tokens - 1, 0)
        if self.every is None or self.mean:
            return self.of(text) + jnp.minimum(tokens, 1)
        full, rest = text // self.every, text % self.every
        return self.tokens * full + self.of(rest) + jnp.minimum(tokens, 1)


@dataclasses.dataclass(frozen=True)
class RunMemory(MemoryTokens):
    """Memory tokens that attend to each other in both directions; a shorter last run has fewer of them.

    Runs have `every` tokens, a multiple of `tokens`. Every memory token attends to its run and to all memory
    tokens of that run (arXiv:2401.09486). It is rotated by, and stays at, the position of the last token that
    it represents, so the cache's positions and length are those of the text. A last run of r tokens has r
    `tokens` / `every` of them, rounded up. fitted: as of `MemoryTokens`, and "repeat" [1, D], the embedding
    of the tokens from which, in fitting, a run is predicted again from its memory.

    Raises ValueError if the length of a run is not a multiple of the size of its memory.

    >>> word = RunMemory(2, every=8)
    >>> word.most(33), word.count(jnp.array([33, 30, 18, 1])).tolist()
    (9, [9, 9, 6, 1])
    """

    by: str = "loma"
    mutual = True

    def __post_init__(self):
        super().__post_init__()
        if self.every is None or self.mean or self.every % self.tokens:
            raise ValueError(
                f"runs are of a multiple of their {self.tokens} memory tokens, of which all stay, got "
                f"{self.every!r} tokens and mean={self.mean}"
            )

    @property
    def ratio(self) -> int:
        """How many tokens of a run one memory token represents."""
        assert self.every is not None
        return self.every // self.tokens

    @property
    def says(self) -> str:
        return (
            f"After every {self.every} tokens of a prompt {self.tokens} learned tokens are read, which see "
            "each other both ways and alone stay."
        )

    def check(self, model: ModelSizes) -> None:
        """Raise InputError if the arrays do not fit the model's sizes or the number of memory tokens."""
        super().check(model)
        check_sizes(self, "repetition", "one, width", "repeat", (1, model.width))

    def of(self, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """How many memory tokens follow a run of `tokens` tokens."""
        return -(-tokens // self.ratio)

    def stands_for(self, tokens: Int[Array, "B"]) -> Int[Array, "B M"]:
        """Which of a run's tokens each of its memory tokens represents: the last one of its share."""
        ends = self.ratio * jnp.arange(1, self.tokens + 1, dtype=jnp.int32)
        return jnp.minimum(ends[None], tokens[:, None]) - 1

    def before(self, number: Int[Array, ""]) -> Int[Array, ""]:
        """Return the position in its turn at which run `number` begins."""
        assert self.every is not None
        return self.every * number

    def stands(self, number: Int[Array, ""], tokens: Int[Array, "B"]) -> Int[Array, "B M"]:
        """Return the positions in its turn of the memory of a run of `tokens` tokens."""
        return self.before(number) + self.stands_for(tokens)

    def after(self, text: Int[Array, "B"]) -> Int[Array, "B"]:
        """Return the position in its turn of the token that follows a text of `text` tokens."""
        return text
