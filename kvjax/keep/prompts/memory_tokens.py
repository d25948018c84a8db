"""Memory tokens: behind every chunk of a prompt some learned tokens are read, whose slots alone stay."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.grammar.facts import Fact, Stating, Told
from kvjax.grammar.fitted import Fitted, ModelSizes, check_sizes
from kvjax.keep.prompts.lora import check_lora


@dataclasses.dataclass(frozen=True)
class MemoryTokens(Stating):
    """Behind every `every` tokens of a prompt `tokens` learned ones are read, which alone stay.

    A chunk sees the memory of the chunks before it and itself; with None the whole prompt is one. Memory
    tokens stand behind their chunk while it is read, and are projected by more weights
    (`kvjax.steps.prefilling.lora`). What is then stored is turned anew, to positions without gaps behind
    those of earlier turns; so the cache's length and positions are those of a text of memory tokens. The last
    token of a prompt is read behind them, sees them and what the cache held, and stays, because it answers.
    mean: the memory is the mean over chunks of what their memory tokens leave, and not all of it.

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
    # Whether the memory tokens of a chunk see those behind them, too.
    mutual = False
    reads = "The prompt is read chunk by chunk, and what learned tokens behind each hold alone stays."

    @property
    def requires(self) -> Told:
        return {
            Fact.GIVEN_WEIGHTS: "reads with weights that lie beside the model's",
            Fact.TURNED_KEYS: "turns memory tokens to where they are stored",
        }

    @property
    def breaks(self) -> Told:
        own = "says itself which slots stay of a prompt"
        alone = dict.fromkeys((Fact.OPEN_CHOICE, Fact.ALL_TOKENS, Fact.WHOLE_PROMPTS), own)
        return {**alone, Fact.PLAIN_READING: "reads tokens with marks"}

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

    def of(self, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """How many memory tokens stand behind a chunk of so many tokens."""
        return self.tokens * jnp.minimum(tokens, 1)

    def stands_for(self, tokens: Int[Array, "B"]) -> Int[Array, "B M"]:
        """For which of a chunk's so many tokens each of its memory tokens stands, which are evenly spaced."""
        ends = jnp.arange(1, self.tokens + 1, dtype=jnp.int32)
        return jnp.maximum(-(-ends[None] * tokens[:, None] // self.tokens), 1) - 1

    def before(self, number: Int[Array, ""]) -> Int[Array, ""]:
        """At which position of its turn a chunk begins that has so many before it."""
        return self.tokens * (jnp.minimum(number, 1) if self.mean else number)

    def stands(self, number: Int[Array, ""], tokens: Int[Array, "B"]) -> Int[Array, "B M"]:
        """At which positions of its turn the memory of a chunk of so many tokens stands."""
        first = jnp.zeros_like(number) if self.mean else self.before(number)
        at = first + jnp.arange(self.tokens, dtype=jnp.int32)
        return jnp.broadcast_to(at, (len(tokens), self.tokens))

    def behind(self, text: Int[Array, "B"]) -> Int[Array, "B"]:
        """At which position of its turn the token behind a text of so many tokens stands."""
        return self.count(text + 1) - 1

    def slots(self, chunks: int) -> int:
        """How many slots the memory of so many chunks is."""
        return self.tokens * (min(chunks, 1) if self.mean else chunks)

    def most(self, tokens: int) -> int:
        """How many slots a prompt of at most `tokens` tokens leaves."""
        return self.slots(self.chunks(tokens)) + 1

    def count(self, tokens: Int[Array, "B"]) -> Int[Array, "B"]:
        """The same, per row of so many tokens; 0 of rows without any."""
        text = jnp.maximum(tokens - 1, 0)
        if self.every is None or self.mean:
            return self.of(text) + jnp.minimum(tokens, 1)
        full, rest = text // self.every, text % self.every
        return self.tokens * full + self.of(rest) + jnp.minimum(tokens, 1)


@dataclasses.dataclass(frozen=True)
class RunMemory(MemoryTokens):
    """Memory tokens that see each other both ways, and of which a shorter last run has its share.

    Runs are of `every` tokens, a multiple of `tokens`, and every memory token sees its run and all memory
    tokens behind that (arXiv:2401.09486). It turns, and stays, at the position of the last token of those
    for which it stands; so the cache's positions and length are those of the text. A last run of r tokens
    has r `tokens` / `every` of them, rounded up. fitted: as of `MemoryTokens`, and "repeat" [1, D], the
    embedding of the tokens by which a fit has a run said again from its memory.

    ValueError for runs that are no multiple of their memory.

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
        """How many tokens of a run a memory token stands for."""
        assert self.every is not None
        return self.every // self.tokens

    @property
    def says(self) -> str:
        return (
            f"Behind every {self.every} tokens of a prompt {self.tokens} learned tokens are read, which see "
            "each other both ways and alone stay."
        )

    def check(self, model: ModelSizes) -> None:
        """InputError where the arrays are those of another kind of model, or of other memory tokens."""
        super().check(model)
        check_sizes(self, "repetition", "one, width", "repeat", (1, model.width))

    def of(self, tokens: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """How many memory tokens are read behind a run of so many tokens."""
        return -(-tokens // self.ratio)

    def stands_for(self, tokens: Int[Array, "B"]) -> Int[Array, "B M"]:
        """For which of a run's so many tokens each of its memory tokens stands: the last of its share."""
        ends = self.ratio * jnp.arange(1, self.tokens + 1, dtype=jnp.int32)
        return jnp.minimum(ends[None], tokens[:, None]) - 1

    def before(self, number: Int[Array, ""]) -> Int[Array, ""]:
        """At which position of its turn a run begins that has so many before it."""
        assert self.every is not None
        return self.every * number

    def stands(self, number: Int[Array, ""], tokens: Int[Array, "B"]) -> Int[Array, "B M"]:
        """At which positions of its turn the memory of a run of so many tokens stands."""
        return self.before(number) + self.stands_for(tokens)

    def behind(self, text: Int[Array, "B"]) -> Int[Array, "B"]:
        """At which position of its turn the token behind a text of so many tokens stands."""
        return text
