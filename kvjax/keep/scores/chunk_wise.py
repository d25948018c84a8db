"""Scores that rank slots within chunks of a prompt, or chunk after chunk."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.grammar.calls import scored, spared
from kvjax.grammar.kinds import Observed, Score, View
from kvjax.keep.algebra import Made
from kvjax.keep.select import top


def chunk_starts(view: View, tokens: int) -> Array:
    """For every slot of a view in position order, the first slot of its chunk of `tokens` tokens."""
    which = jnp.where(view.pos >= 0, view.pos // tokens, jnp.iinfo(jnp.int32).max)
    return jax.vmap(jax.vmap(jnp.searchsorted))(which, which).astype(jnp.int32)


def check_tokens(word: str, tokens: object) -> None:
    """Raise ValueError if a word's `tokens` is not a positive integer."""
    if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1:
        raise ValueError(f"{word} needs a whole number of tokens >= 1, got {tokens!r}")


@dataclasses.dataclass(frozen=True)
class WithinChunks(Made):
    """Minus the fraction of a slot's chunk of `tokens` tokens that scores as high or higher.

    So every chunk of a text keeps the same share of its slots, protected slots included. Slots that rounding
    leaves over go to the first chunks.
    """

    score: Score
    tokens: int
    ordered = True  # pyright: ignore[reportAssignmentType]

    def __post_init__(self):
        check_tokens("WithinChunks", self.tokens)

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        slots, starts = view.pos.shape[-1], chunk_starts(view, self.tokens)
        score = jnp.where(spared(view, seen), jnp.inf, scored(self.score, view, seen))
        score = jnp.where(view.pos >= 0, score, -jnp.inf)
        count = jax.vmap(jax.vmap(lambda at: jnp.zeros(slots, jnp.int32).at[at].add(1)))(starts)
        many = jnp.take_along_axis(count, starts, -1).astype(jnp.float32)
        return -(_rank_within(score, starts) + 1).astype(jnp.float32) / many


@dataclasses.dataclass(frozen=True)
class BlockByBlock(Made):
    """1 for the slots that stay when slots are selected block by block, 0 for all others.

    Of a head's first n slots and the next `tokens`, the n best stay; of those and the next `tokens`, again
    the n best, until the text ends. Each time the score sees only the candidates; slots that are protected at
    the end of the text always stay.
    """

    score: Score
    tokens: int
    ordered = True  # pyright: ignore[reportAssignmentType]

    def __post_init__(self):
        check_tokens("BlockByBlock", self.tokens)

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live, protected = view.pos >= 0, spared(view, seen)
        slot = jax.lax.broadcasted_iota(jnp.int32, view.pos.shape, 2)
        n = jnp.broadcast_to(seen.n[:, None], view.pos.shape[:2])

        def block(i: int | Array, kept: Bool[Array, "B K S"]) -> Bool[Array, "B K S"]:
            """Select among the slots kept so far and the i-th block after the first n slots."""
            start = n[..., None] + i * self.tokens
            among = kept | (live & (slot >= start) & (slot < start + self.tokens))
            score = scored(self.score, view._replace(pos=jnp.where(among, view.pos, -1)), seen)
            score = jnp.where(protected, jnp.inf, score)
            return top(jnp.where(among, score, -jnp.inf), n)

        first = live & (slot < n[..., None])
        kept = jax.lax.fori_loop(0, -(-view.pos.shape[-1] // self.tokens), block, first)
        return kept.astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class EntropyGated(Made):
    """Ranks chunks of `tokens` tokens by a layer's mean score; spiky chunks keep only a few tokens.

    A chunk is spiky if its mean is at least the median over chunks, and the entropy of its scores, divided by
    the log of its length, is below the median: then only its `few` best tokens rank with the chunk, and its
    others rank after all chunks, by their own scores. Within a chunk the best tokens come first. Medians are
    lower medians.
    """

    score: Score
    tokens: int = 10
    few: int = 4
    ordered = True  # pyright: ignore[reportAssignmentType]

    def __post_init__(self):
        check_tokens("EntropyGated", self.tokens)
        if not 0 < self.few < self.tokens:
            raise ValueError(
                f"of {self.tokens} tokens a spiky chunk keeps 1 or more, and not all: got {self.few!r}"
            )

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live, slots = view.pos >= 0, view.pos.shape[-1]
        score = jnp.where(live, scored(self.score, view, seen), 0.0).sum(1, keepdims=True)
        score = jnp.broadcast_to(score, view.pos.shape)
        starts = chunk_starts(view, self.tokens)

        def over_chunk(x: Float[Array, "B K S"], how: str = "add") -> Float[Array, "B K S"]:
            """Compute the sum, or the minimum, over a slot's chunk."""
            start = jnp.full(slots, 0.0 if how == "add" else jnp.inf, jnp.float32)
            found = jax.vmap(jax.vmap(lambda x, at: getattr(start.at[at], how)(x)))(x, starts)
            return jnp.take_along_axis(found, starts, -1)

        many = over_chunk(live.astype(jnp.float32))
        mean = over_chunk(jnp.where(live, score, 0.0)) / jnp.maximum(many, 1)
        above = score - jnp.minimum(over_chunk(jnp.where(live, score, jnp.inf), "min"), 0.0)
        p = jnp.where(live, above, 0.0) / (over_chunk(jnp.where(live, above, 0.0)) + 1e-8)
        entropy = over_chunk(-p * jnp.log(p + 1e-8)) / jnp.log(jnp.maximum(many, 2))
        entropy = jnp.where(many > 1, jnp.clip(entropy, 0.0, 1.0), 0.0)
        leads = live & (starts == jax.lax.broadcasted_iota(jnp.int32, starts.shape, 2))
        spiky = (mean >= _lower_median(mean, leads)) & (entropy < _lower_median(entropy, leads))
        within = _rank_within(score, starts)
        late = spiky & (within >= self.few)
        # Chunks in descending order of mean, the first one of equals first.
        order = jnp.lexsort((within, starts, -jnp.where(live, mean, -jnp.inf), late & live))
        by_score = jnp.lexsort((-score, ~(late & live)))
        place, alone = _inverse(order), _inverse(by_score)
        others = (live & ~late).sum(-1, keepdims=True)
        return -jnp.where(late, others + alone, place).astype(jnp.float32)


def _inverse(order: Array) -> Array:
    """Find the place of every slot in an order."""
    at = jnp.broadcast_to(jnp.arange(order.shape[-1], dtype=order.dtype), order.shape)
    return jnp.put_along_axis(jnp.zeros_like(order), order, at, -1, inplace=False)


def _rank_within(score: Float[Array, "B K S"], starts: Array) -> Array:
    """How many slots of the same chunk rank before a slot; of equal scores the first slot ranks first."""
    return _inverse(jnp.lexsort((-score, starts))).astype(jnp.int32) - starts


def _lower_median(x: Float[Array, "B K S"], of: Bool[Array, "B K S"]) -> Float[Array, "B K 1"]:
    """Compute the median over the slots `of`; with an even number, the lower of the two middle ones."""
    middle = (jnp.maximum(of.sum(-1, keepdims=True), 1) - 1) // 2
    return jnp.take_along_axis(jnp.sort(jnp.where(of, x, jnp.inf), -1), middle, -1)
