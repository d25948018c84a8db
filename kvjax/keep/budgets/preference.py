"""Allocations that need more than scores: recorded queries or fitted numbers decide how much a head gets."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar import Budget
from kvjax.grammar.kinds import Observation, Observed, Preferring, View
from kvjax.keep.budgets.budget import rest_of_mean
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import attention_to_older, over_queries


@dataclasses.dataclass(frozen=True)
class ByAttention(Preferring):
    """CAKE (arXiv:2503.12491, section 4.1): layers get shares by the spread and variation of attention.

    A layer's preference is P = H^(1/tau1) V^(1/tau2). With p the attention of the last `window` queries to
    the tokens before them, H = -sum p log p over heads, queries and tokens, and V is the variance of p over
    the queries, summed over heads and tokens. Every layer keeps `window` slots, or those that are protected,
    if they are more; the remaining slots are shared in proportion to P. All heads of a layer keep equally
    many.
    """

    window: int
    tau1: float = 1.0
    tau2: float = 1.0
    across_layers = True

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.window)})

    def preference(self, view: View, seen: Observed) -> Float[Array, "B K"]:
        p, (_, q_pos) = attention_to_older(view, seen, self.window), seen.of(Queries(self.window))
        # The authors' 1e-10 keeps log(0) finite.
        entropy = -(p * jnp.log(p + 1e-10)).sum((1, 2, 3, 4))
        variance = over_queries(p, q_pos)[1].sum((1, 2, 3))
        preferred = jnp.maximum(entropy, 0.0) ** (1 / self.tau1) * variance ** (1 / self.tau2)
        return jnp.broadcast_to(preferred[:, None], view.pos.shape[:2])

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def layer_rest(self, budget: Budget, tokens: int, layers: int, heads: int) -> list[int]:
        return rest_of_mean(budget, tokens, layers, heads)

    def counts(
        self,
        scores: Float[Array, "L B K S"],
        n: Int[Array, "B"],
        preferences: Float[Array, "L B K"] | None = None,
    ) -> Int[Array, "L B K"]:
        assert preferences is not None
        protected, live = protected_and_live(scores)
        base = jnp.minimum(n, jnp.maximum(protected.max(0), self.window))
        more = apportioned(preferences.max(2), len(scores) * (n - base), jnp.maximum(live - base[None], 0))
        return jnp.broadcast_to((base[None] + more)[..., None], scores.shape[:3])


def protected_and_live(scores: Float[Array, "L B K S"]) -> tuple[Int[Array, "L B"], Int[Array, "L B"]]:
    """How many slots of a layer's heads are protected, and how many are live."""
    protected, live = (scores == jnp.inf), (scores > -jnp.inf)
    return protected.sum(-1, dtype=jnp.int32).max(2), live.sum(-1, dtype=jnp.int32).max(2)


def apportioned(
    preferred: Float[Array, "M B"], total: Int[Array, "B"], most: Int[Array, "M B"]
) -> Int[Array, "M B"]:
    """Shares a total among M parties in proportion to `preferred`, with at most `most` for each.

    Shares are rounded down. What remains is spread evenly over the parties that can hold more, with one more
    for the first ones where it does not divide; so the total is used up unless all are full.

    >>> preferred = jnp.array([[3.0], [1.0], [0.0]])
    >>> apportioned(preferred, jnp.array([12]), jnp.array([[9], [9], [9]])).T.tolist()
    [[9, 3, 0]]
    >>> apportioned(preferred, jnp.array([13]), jnp.array([[7], [9], [9]])).T.tolist()
    [[7, 5, 1]]
    """
    part = preferred / jnp.maximum(preferred.max(0, keepdims=True), 1e-30)
    part = part / jnp.maximum(part.sum(0, keepdims=True), 1e-30)
    base = jnp.floor(part * total.astype(jnp.float32)[None]).astype(jnp.int32)
    return given_away(base, total, most)


def given_away(base: Int[Array, "M B"], total: Int[Array, "B"], most: Int[Array, "M B"]) -> Int[Array, "M B"]:
    """Add what `base` leaves of a total to the shares of M parties, none above its `most`.

    What remains is spread evenly over the parties that can hold more, with one more for the first ones where
    it does not divide.

    >>> given_away(jnp.array([[3], [1], [9]]), jnp.array([12]), jnp.array([[9], [9], [5]])).T.tolist()
    [[5, 2, 5]]
    """
    base = jnp.minimum(base, most)

    def held(more: Int[Array, "B"]) -> Int[Array, "M B"]:
        return jnp.clip(base + more[None], 0, most)

    def halve(_: int | Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        """Bisect the interval that contains the largest amount that every party can get in addition."""
        low, high = bounds
        middle = (low + high + 1) // 2
        fits = held(middle).sum(0, dtype=jnp.int32) <= total
        return jnp.where(fits, middle, low), jnp.where(fits, high, middle - 1)

    # The remainder is negative only if float32 rounded the share of a large total up.
    ends = (-most.max(0), most.max(0))
    count = held(jax.lax.fori_loop(0, 32, halve, ends)[0])
    room, left = count < most, total - count.sum(0, dtype=jnp.int32)
    extra = room & (jnp.cumsum(room, 0, dtype=jnp.int32) <= left[None])
    return count + extra.astype(jnp.int32)
