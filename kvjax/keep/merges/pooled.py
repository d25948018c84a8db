"""Compressive Transformer: every few tokens older than a window become one pooled slot."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.grammar.kinds import Merge, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.merges.merge import pick


@dataclasses.dataclass(frozen=True)
class LastOfGroup(Word):
    """Position, and -inf for all older tokens but the last one of every `rate` tokens of the text.

    Older tokens are those before the newest floor(recent * n) tokens of a budget n, in whole groups of
    `rate`.
    """

    looks = False

    rate: int
    recent: float = 0.5

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        window = seen.n * round(self.recent * 1000) // 1000
        first = jnp.maximum(seen.length - window, 0) // self.rate * self.rate
        leaves = (view.pos < first[:, None, None]) & (view.pos % self.rate != self.rate - 1)
        return jnp.where(leaves, -jnp.inf, view.pos.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class MeanOfGroup(Merge):
    """Merges every `rate` tokens of a text into the last one, as the mean of their keys and values.

    If the last one is evicted, too, all of them are dropped (Compressive Transformer, arXiv:1911.05507).
    """

    rate: int
    writes = ("k", "v")

    def __call__(
        self, view: View, kept: Bool[Array, "B K S"], leaving: Int[Array, "B K E"], seen: Observed
    ) -> View:
        """Merge the view's slots `leaving` into `kept` ones; index S means no slot."""
        slots, index = view.pos.shape[-1], jnp.minimum(leaving, view.pos.shape[-1] - 1)
        goal = jnp.where(leaving < slots, pick(view.pos, index) // self.rate * self.rate + self.rate - 1, -2)
        order = jnp.argsort(jnp.where(kept, view.pos, jnp.iinfo(jnp.int32).max), axis=-1)
        held = pick(jnp.where(kept, view.pos, jnp.iinfo(jnp.int32).max), order)
        found = jax.vmap(jax.vmap(jnp.searchsorted))(held, goal).astype(jnp.int32)
        found = jnp.minimum(found, slots - 1)
        target = jnp.where(pick(held, found) == goal, pick(order, found), slots).astype(jnp.int32)
        add = jax.vmap(jax.vmap(lambda x, t, y: x.at[t].add(y, mode="drop")))
        count = add(jnp.ones(view.pos.shape, jnp.float32), target, jnp.ones(index.shape, jnp.float32))

        def mean(x: Float[Array, "B K S H"]) -> Float[Array, "B K S H"]:
            own = x.astype(jnp.float32)
            total = add(own, target, pick(own, index)) / count[..., None]
            return jnp.where((count > 1)[..., None], total, own).astype(x.dtype)

        return view._replace(k=mean(view.k), v=mean(view.v))
