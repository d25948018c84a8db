"""LaCache's score: every layer keeps other tokens of the past, in steps like those of a ladder."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import Inputs, Observed, SelectionTrace, Trace, View
from kvjax.keep.algebra import Word

# Values of a slot's trace: kept from a step that was cut in this round, or to be evicted; 0 otherwise.
_LEFT, _LEAVES = 1.0, -1.0


class _Cut(NamedTuple):
    """`number` steps of `size` slots each, starting at place `first`, per KV head."""

    first: Int[Array, "B K 1"]
    size: Int[Array, "B K 1"] | int
    number: Int[Array, "B K 1"]

    @property
    def end(self) -> Int[Array, "B K 1"]:
        return self.first + self.number * self.size


@dataclasses.dataclass(frozen=True)
class Rungs(SelectionTrace):
    """1 for a slot kept from a step cut in this round, -1 for one to evict now, else 0 (arXiv:2507.14204).

    Slots in position order, after the first `sinks` and before the `newest` ones, are cut into steps of
    `size` slots, the oldest ones first, as many steps as bring a KV head down to its budget. Of each step,
    layer l keeps `kept` consecutive slots from the (l mod (size - kept + 1))-th on. Kept slots are not cut
    again until all others were; then a new round begins after the sinks. If one round does not suffice, as at
    the end of a long prompt, steps of the new round are t times as long, and layers keep every t-th slot from
    their place in the step on.
    """

    size: int = 2
    kept: int = 1
    sinks: int = 4
    newest: int = 32

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.zeros((b, heads, t), jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old

    def judge(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        mark, live = view.of(self), view.pos >= 0
        held = live.sum(-1, keepdims=True, dtype=jnp.int32)
        n = jnp.broadcast_to(seen.n[:, None, None], held.shape)
        first = (live & (view.pos < self.sinks)).sum(-1, keepdims=True, dtype=jnp.int32)
        down = self.size - self.kept
        # This round: slots kept from its earlier steps follow the sinks.
        settled = first + (live & (mark == _LEFT)).sum(-1, keepdims=True, dtype=jnp.int32)
        able = jnp.minimum(
            (n - self.newest - settled) // self.kept, (held - self.newest - settled) // self.size
        )
        many = jnp.maximum(held - n, 0)
        one = _Cut(settled, self.size, jnp.clip(able, 0, -(-many // down)))
        place = jnp.cumsum(live, -1, dtype=jnp.int32) - 1
        goes = self._leaves(place, one, 1, seen.layer)
        # The next round, if this one does not suffice.
        held, more = held - one.number * down, many - one.number * down
        again = more > 0
        within = jnp.maximum((n - first - self.newest) // self.kept, 1) * down
        times = jnp.maximum(-(-more // within), 1)
        size = self.size + (times - 1) * (self.size - 1)
        number = jnp.minimum(
            -(-more // (size - self.kept)), jnp.maximum(held - self.newest - first, 0) // size
        )
        two = _Cut(first, size, jnp.where(again, number, 0))
        place2 = jnp.cumsum(live & ~goes, -1, dtype=jnp.int32) - 1
        cut = jnp.where(again, self._within(place2, two), self._within(place, one) | (mark == _LEFT))
        goes |= self._leaves(place2, two, times, seen.layer)
        new = jnp.where(goes, _LEAVES, jnp.where(cut, _LEFT, 0.0))
        return jnp.where(live & (many > 0), new, mark)

    def _within(self, place: Int[Array, "B K S"], cut: _Cut) -> Bool[Array, "B K S"]:
        return (place >= cut.first) & (place < cut.end)

    def _leaves(
        self, place: Int[Array, "B K S"], cut: _Cut, times: Int[Array, "B K 1"] | int, layer: int | Array
    ) -> Bool[Array, "B K S"]:
        """Find the slots of the steps being cut that a layer does not keep."""
        starts = times * (self.size - self.kept) + 1
        along = jnp.mod(place - cut.first, cut.size) - jnp.mod(jnp.asarray(layer, jnp.int32), starts)
        stays = (along >= 0) & (jnp.mod(along, times) == 0) & (along < times * self.kept)
        return self._within(place, cut) & ~stays


@dataclasses.dataclass(frozen=True)
class Ladder(Word):
    """Newer is better, and -inf for slots that `Rungs` marks for eviction."""

    ordered = True
    looks = False

    size: int = 2
    kept: int = 1
    sinks: int = 4
    newest: int = 32

    @property
    def rungs(self) -> Rungs:
        return Rungs(self.size, self.kept, self.sinks, self.newest)

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({self.rungs})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return jnp.where(view.of(self.rungs) == _LEAVES, -jnp.inf, view.pos.astype(jnp.float32))
