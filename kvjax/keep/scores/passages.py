"""Passages: tokens of a text, cut by length or at separators, that stay or are evicted together."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Observed, Score, Trace, View
from kvjax.keep.algebra import Made
from kvjax.keep.scores.tokens import IsTokenType


@dataclasses.dataclass(frozen=True)
class PassageMean(Made):
    """The mean of a score over the passage of a slot, or over the passage's `best` best slots (0: over all).

    cut: the length of passages in tokens, or the separators at which they end.
    """

    score: Score
    cut: int | IsTokenType
    best: int = 0

    @property
    def ordered(self) -> bool:
        return True

    @property
    def traces(self) -> frozenset[Trace]:
        more = {self.cut} if isinstance(self.cut, IsTokenType) else set()
        return self.score.traces | more

    @property
    def needs(self):
        return self.score.needs

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        live, slots = view.pos >= 0, view.pos.shape[-1]
        score = jnp.where(live, scored(self.score, view, seen), -jnp.inf)
        # Slots are in position order, so the slots of a passage are contiguous; empty ones come last.
        which = jnp.where(live, self._number(view), slots)
        order = jnp.lexsort((-score, which))
        starts = jax.vmap(jax.vmap(jnp.searchsorted))(which, which).astype(jnp.int32)
        place = jnp.arange(slots, dtype=jnp.int32)[None, None] - starts
        sorted_score = jnp.take_along_axis(score, order, -1)
        counts = live & ((place < self.best) | (self.best == 0))
        add = jax.vmap(jax.vmap(lambda x, at: jnp.zeros_like(x).at[at].add(x)))
        total = add(jnp.where(counts, sorted_score, 0.0), starts)
        many = add(counts.astype(jnp.float32), starts)
        return jnp.take_along_axis(total / jnp.maximum(many, 1.0), starts, -1)

    def _number(self, view: View) -> Int[Array, "B K S"]:
        """Return the number of each live slot's passage, ascending."""
        if isinstance(self.cut, int):
            return view.pos // self.cut
        ends = (view.of(self.cut) > 0).astype(jnp.int32)
        return jnp.cumsum(ends, -1) - ends
