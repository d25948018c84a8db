"""Allocations over layers, whose heads all keep equally many slots; a score that the heads share."""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Allocation, Observation, Observed, Preferring, Score, View
from kvjax.keep.algebra import Made
from kvjax.keep.budgets.preference import apportioned, given_away, protected_and_live
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import attention_to_older
from kvjax.keep.select import ranks


@dataclasses.dataclass(frozen=True)
class MeanOverHeads(Made):
    """The mean of a score over the KV heads of a layer, so that they all keep the same slots."""

    score: Score

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        each = scored(self.score, view, seen)
        return jnp.broadcast_to(each.mean(1, keepdims=True), each.shape)


@dataclasses.dataclass(frozen=True)
class ByUncertainty(Preferring):
    """ZigZagKV (arXiv:2412.09036): layers that need more tokens get larger shares.

    The need u of a layer is the mean over heads of the fewest tokens before the last `window` ones that hold
    the share `mass` of the attention that the window's queries give to those tokens. Every layer keeps the
    window and floor(least * n') slots, where n' is the budget n without the window; the remaining slots are
    shared among layers in proportion to u.
    """

    window: int
    mass: float = 0.9
    least: float = 0.5
    across_layers = True

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.window)})

    def preference(self, view: View, seen: Observed) -> Float[Array, "B K"]:
        given = attention_to_older(view, seen, self.window).sum(3)
        found = jnp.cumsum(-jnp.sort(-given, axis=-1), -1)
        short = found < self.mass * given.sum(-1, keepdims=True)
        needed = jnp.minimum(short.sum(-1) + 1, given.shape[-1]).astype(jnp.float32).mean((1, 2))
        return jnp.broadcast_to(needed[:, None], view.pos.shape[:2])

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def fewest(self, n: int, tokens: int) -> int:
        """Count the slots that every head of any layer keeps."""
        return min(n, self.window) + max(n - self.window, 0) * round(self.least * 1000) // 1000

    def counts(
        self,
        scores: Float[Array, "L B K S"],
        n: Int[Array, "B"],
        preferences: Float[Array, "L B K"] | None = None,
    ) -> Int[Array, "L B K"]:
        assert preferences is not None
        live = (scores > -jnp.inf).sum(-1, dtype=jnp.int32).max(2)
        spare = jnp.maximum(n - self.window, 0)
        base = jnp.minimum(n, self.window) + spare * round(self.least * 1000) // 1000
        more = apportioned(preferences.max(2), len(scores) * (n - base), jnp.maximum(live - base[None], 0))
        return jnp.broadcast_to((base[None] + more)[..., None], scores.shape[:3])


@dataclasses.dataclass(frozen=True)
class ByHits(Allocation):
    """DynamicKV (arXiv:2412.14838): layers get shares by how many of the stack's best slots they hold.

    Protected slots score infinity and are not counted. n' is the budget without them; the L * K * n' best
    scores of all layers are counted by layer. Layers share L * n' slots in proportion to these counts, and
    none gets more than most * n'.
    """

    most: float = 10.0
    across_layers = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        layers, b, heads, _ = scores.shape
        base, live = protected_and_live(scores)
        spare = jnp.maximum(n - base.max(0), 0)
        free = jnp.where(jnp.isfinite(scores), scores, -jnp.inf)
        flat = jnp.moveaxis(free, 1, 0).reshape(b, -1)
        best = (ranks(flat) < (layers * heads * spare)[:, None]) & (flat > -jnp.inf)
        hits = best.reshape(b, layers, -1).sum(-1, dtype=jnp.int32).T
        limit = jnp.minimum(live - base, spare[None] * round(self.most * 1000) // 1000)
        # L * K * n' hits share L * n' slots.
        more = given_away(hits // heads, layers * spare, limit)
        return jnp.broadcast_to((base + more)[..., None], scores.shape[:3])


@dataclasses.dataclass(frozen=True)
class ByPrefix(Allocation):
    """PrefixKV (arXiv:2412.03409): every layer keeps the same share of its total importance.

    All heads of a layer share one score. Protected slots score infinity. Of the others a layer keeps the
    fewest slots whose scores sum to the share p of all finite scores; p is the largest share for which all
    layers together keep at most L * n slots. Remaining slots go to the layers one by one, from the first. A
    negative score counts as 0.
    """

    across_layers = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        base, live = protected_and_live(scores)
        free = scores[:, :, 0]
        free = jnp.maximum(jnp.where(jnp.isfinite(free), free, 0.0), 0.0)
        part = jnp.cumsum(-jnp.sort(-free, axis=-1), -1)
        part = part / jnp.maximum(part[..., -1:], 1e-30)
        # What is before each slot: a share of 0 keeps none of them.
        before = jnp.concatenate([jnp.zeros_like(part[..., :1]), part[..., :-1]], -1)
        most, total = live - base, len(scores) * n - base.sum(0)

        def kept(p: Float[Array, "B"]) -> Int[Array, "L B"]:
            return jnp.minimum((before < p[None, :, None]).sum(-1, dtype=jnp.int32), most)

        def halve(_: int | Array, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
            """Bisect the interval that contains the largest share that fits."""
            low, high = bounds
            p = (low + high) / 2
            fits = kept(p).sum(0) <= total
            return jnp.where(fits, p, low), jnp.where(fits, high, p)

        ends = (jnp.zeros(n.shape, jnp.float32), jnp.full(n.shape, 2.0, jnp.float32))
        count = kept(jax.lax.fori_loop(0, 32, halve, ends)[0])
        room, left = count < most, total - count.sum(0)
        extra = room & (jnp.cumsum(room, 0, dtype=jnp.int32) <= left[None])
        return jnp.broadcast_to((base + count + extra.astype(jnp.int32))[..., None], scores.shape[:3])


@dataclasses.dataclass(frozen=True)
class ByDecay(Allocation):
    """PyramidInfer (arXiv:2405.12532): each layer keeps the fraction r_l of what the layer below keeps.

    After layer l the fraction is r_l = decay + (1 - decay) (cos(pi l / L) + 1) / 2, as in the authors' code.
    Every layer keeps `window` slots, or those that are protected, if they are more; the remaining slots are
    shared in proportion to the products r_0 ... r_(l-1).
    """

    window: int
    decay: float = 0.9
    across_layers = True

    def layer_slots(self, n: int, tokens: int, layers: int, heads: int) -> list[int]:
        return [heads * n] * layers

    def left(self, layers: int) -> list[float]:
        """Compute the fraction of a prompt that each of `layers` layers keeps.

        >>> [round(x, 3) for x in ByDecay(4, 0.5).left(2)]
        [1.0, 1.0]
        """
        rates = [
            self.decay + (1 - self.decay) * (math.cos(math.pi * i / layers) + 1) / 2 for i in range(layers)
        ]
        return list(itertools.accumulate(rates[:-1], operator.mul, initial=1.0))

    def counts(self, scores: Float[Array, "L B K S"], n: Int[Array, "B"]) -> Int[Array, "L B K"]:
        protected, live = protected_and_live(scores)
        base = jnp.minimum(n, jnp.maximum(protected.max(0), self.window))
        left = jnp.broadcast_to(jnp.asarray(self.left(len(scores)), jnp.float32)[:, None], live.shape)
        more = apportioned(left, len(scores) * (n - base), jnp.maximum(live - base[None], 0))
        return jnp.broadcast_to((base[None] + more)[..., None], scores.shape[:3])
