"""LagKV's score: how much the channels of a token vary, normalised by the tokens that come after it."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.grammar.kinds import Inputs, Observed, SelectionTrace, Trace, View
from kvjax.keep.algebra import Word

# The value of a slot's trace before its partition is ranked.
_UNRANKED = -1.0


@dataclasses.dataclass(frozen=True)
class LagRank(SelectionTrace):
    """The rank of a slot in its partition, from 0 to 1 - 1 / lag; -1 until the partition is ranked.

    After the first `sinks` tokens and the slots ranked earlier, slots in position order are cut into
    partitions of `lag`. A full partition is ranked, once, as soon as the next one is full, too, by

        score[j] = softmax_j(std_h((k_jh - min_h) / (max_h - min_h))),

    averaged with the same score of the values; min and max are those of a channel over the next partition,
    std runs over the channels (with H - 1) and the softmax over the partition.
    """

    lag: int = 128
    sinks: int = 4

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.full((b, heads, t), _UNRANKED, jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old

    def judge(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        """Compute the ranks at the time of a selection, with the partitions that are full by now."""
        old, live, slots = view.of(self), view.pos >= 0, view.pos.shape[-1]
        parts = slots // self.lag
        if parts < 2:
            return old
        settled = live & ((view.pos < self.sinks) | (old >= 0))
        # Sinks and ranked slots are the oldest ones, so they come first in position order.
        first = settled.sum(-1, keepdims=True, dtype=jnp.int32)
        whole = (live.sum(-1, keepdims=True, dtype=jnp.int32) - first) // self.lag
        index = jnp.minimum(first + jnp.arange(parts * self.lag, dtype=jnp.int32)[None, None], slots - 1)
        score = (self._scores(view.k, index) + self._scores(view.v, index)) / 2
        order = jnp.argsort(score, axis=-1, stable=True)
        place = jnp.argsort(order, axis=-1, stable=True).astype(jnp.float32) / self.lag
        place = jnp.pad(place.reshape(*place.shape[:2], -1), ((0, 0), (0, 0), (0, slots)))
        back = jnp.arange(slots, dtype=jnp.int32)[None, None] - first
        mine = jnp.take_along_axis(place, jnp.clip(back, 0, place.shape[-1] - 1), axis=-1)
        return jnp.where(live & (back >= 0) & (back < (whole - 1) * self.lag), mine, old)

    def _scores(self, x: Float[Array, "B K S H"], index: Int[Array, "B K T"]) -> Float[Array, "B K P L"]:
        """Compute the scores of all partitions but the last, whose next one may not be full."""
        b, heads, _, width = x.shape
        parts = jnp.take_along_axis(x.astype(jnp.float32), index[..., None], axis=2)
        parts = parts.reshape(b, heads, -1, self.lag, width)
        low = parts.min(3, keepdims=True)[:, :, 1:]
        spread = parts.max(3, keepdims=True)[:, :, 1:] - low
        relative = (parts[:, :, :-1] - low) / jnp.where(spread == 0, 1.0, spread)
        return jax.nn.softmax(relative.std(-1, ddof=1), -1)


@dataclasses.dataclass(frozen=True)
class LagRelative(Word):
    """A slot's `LagRank`; slots without one (the newest lag .. 2 lag - 1) score higher, the newest first."""

    ordered = True

    lag: int = 128
    sinks: int = 4

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({LagRank(self.lag, self.sinks)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        place = view.of(LagRank(self.lag, self.sinks))
        newness = (
            view.pos.astype(jnp.float32) / jnp.maximum(seen.length, 1).astype(jnp.float32)[:, None, None]
        )
        return jnp.where(place >= 0, place, 1.0 + newness)
