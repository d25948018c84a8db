"""Composite tokens: the r-th best slots of a layer's heads stay or leave together (arXiv:2509.05165)."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Allocation, Observed, Score, View
from kvjax.keep.algebra import Made
from kvjax.keep.select import ranks


def over_heads(view: View, x: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
    """For every slot, the sum of `x` over all slots of the layer's heads that hold the same token.

    After an earlier eviction heads hold different tokens, so slots are matched by position; `x` is zero in
    empty slots.
    """
    heads, slots = view.pos.shape[1:]
    at = jnp.where(view.pos < 0, 2**30, view.pos)
    order = jnp.argsort(at, -1)
    at, mine = jnp.take_along_axis(at, order, -1), jnp.take_along_axis(x, order, -1)
    find, total = jax.vmap(jax.vmap(jnp.searchsorted)), x
    for shift in range(1, heads):
        other, theirs = jnp.roll(at, shift, 1), jnp.roll(mine, shift, 1)
        index = jnp.minimum(find(other, view.pos).astype(jnp.int32), slots - 1)
        same = jnp.take_along_axis(other, index, -1) == view.pos
        total = total + jnp.where(same, jnp.take_along_axis(theirs, index, -1), 0.0)
    return total


@dataclasses.dataclass(frozen=True)
class PlusLayerMean(Made):
    """score[h, j] + mean_h score[h, j]: a head's own score of a token plus the mean over the layer's heads.

    A head that no longer holds the token counts as 0 in the mean.
    """

    score: Score

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        score = jnp.where(view.pos >= 0, scored(self.score, view, seen), 0.0)
        return score + over_heads(view, score) / view.pos.shape[1]


@dataclasses.dataclass(frozen=True)
class Composite(Allocation):
    """KVCompose: layers share L * n slots per head by their number of the stack's best composite tokens.

    A layer's r-th composite token consists of the r-th best slot of each of its heads, and its score is their
    mean. The first layer's scores are raised to at least the largest of all layers, as in the authors' code.
    The best composite token of every layer stays. All heads of a layer keep equally many slots.
    """

    across_layers = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers, b, _, slots = scores.shape
        composite = jnp.sort(scores, -1, descending=True).mean(2)
        composite = composite.at[0].set(composite.max(0)).at[:, :, 0].set(jnp.inf)
        flat = jnp.moveaxis(composite, 1, 0).reshape(b, layers * slots)
        best = (ranks(flat) < (layers * n)[:, None]) & (flat > -jnp.inf)
        count = best.reshape(b, layers, slots).sum(-1, dtype=jnp.int32)
        return jnp.broadcast_to(jnp.moveaxis(count, 1, 0)[..., None], scores.shape[:3])
