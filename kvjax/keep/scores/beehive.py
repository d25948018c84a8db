"""BUZZ: keeps one sample of every few tokens before the window, and later one of a few samples."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.grammar.kinds import Inputs, Observed, SelectionTrace, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Mass
from kvjax.keep.observations.trace import AccumulatedMass

# Values of a slot's trace: sampled, or to be evicted; 0 before it was considered.
_SAMPLE, _LEAVES = 1.0, -1.0


@dataclasses.dataclass(frozen=True)
class SampleState(SelectionTrace):
    """1 for a sample, -1 for a slot to be evicted now, 0 for a slot that was not considered yet.

    The slots considered are those after the first `sinks` tokens and before the newest floor(recent * n)
    ones, whenever they exceed what is left of the budget n. In position order, of the old samples every
    ceil(stride / 2)-th stays, from the first. Of every `stride` consecutive other slots, the one with the
    most accumulated attention becomes a sample (the older one of equals).
    """

    stride: int = 5
    sinks: int = 4
    recent: float = 0.3

    def start(self, inputs: Inputs, heads: int) -> Float[Array, "B K T"]:
        b, t = inputs.pos.shape
        return jnp.zeros((b, heads, t), jnp.float32)

    def grow(self, old: Float[Array, "*lists S"], seen: Observed) -> Float[Array, "*lists S"]:
        return old

    def judge(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        mark = view.of(self)
        window = (seen.n * round(self.recent * 1000)) // 1000
        between = (view.pos >= self.sinks) & (view.pos < (seen.length - window)[:, None, None])
        many = between.sum(-1, keepdims=True) > (seen.n - self.sinks - window)[:, None, None]
        old, new = between & (mark == _SAMPLE), between & (mark != _SAMPLE)
        place = jnp.cumsum(old, -1, dtype=jnp.int32) - 1
        stays = old & (place % -(-self.stride // 2) == 0)
        stays |= self._peaks(view.of(AccumulatedMass(Mass("sum"))), new)
        return jnp.where(many & between, jnp.where(stays, _SAMPLE, _LEAVES), mark)

    def _peaks(self, received: Float[Array, "B K S"], new: Bool[Array, "B K S"]) -> Bool[Array, "B K S"]:
        """Mark the largest received attention of each run of `stride` consecutive new slots."""
        slots = new.shape[-1]
        first = jnp.argmax(new, -1, keepdims=True).astype(jnp.int32)
        along = jnp.arange(-(-slots // self.stride) * self.stride, dtype=jnp.int32)[None, None]
        order = jnp.minimum(first + along, slots)
        pad = ((0, 0), (0, 0), (0, 1))
        masked = jnp.pad(jnp.where(new, received, -jnp.inf), pad, constant_values=-jnp.inf)
        parts = jnp.take_along_axis(masked, order, -1).reshape(*new.shape[:2], -1, self.stride)
        best = first + jnp.argmax(parts, -1).astype(jnp.int32)
        best += self.stride * jnp.arange(parts.shape[2], dtype=jnp.int32)[None, None]
        rows = jax.vmap(jax.vmap(lambda x, i: x.at[i].set(True, mode="drop")))
        return rows(jnp.zeros(new.shape, bool), best) & new


@dataclasses.dataclass(frozen=True)
class SampledAttention(Word):
    """Accumulated attention, and -inf for slots that `SampleState` marks for eviction."""

    ordered = True
    looks = False

    stride: int = 5
    sinks: int = 4
    recent: float = 0.3

    @property
    def sampled(self) -> SampleState:
        return SampleState(self.stride, self.sinks, self.recent)

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(Mass("sum")), self.sampled})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        leaves = view.of(self.sampled) == _LEAVES
        return jnp.where(leaves, -jnp.inf, view.of(AccumulatedMass(Mass("sum"))))
