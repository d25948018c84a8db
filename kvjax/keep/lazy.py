"""Lazy layers: those whose queries look at the ends of a text alone."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.keep.algebra import Word
from kvjax.keep.observe import Queries
from kvjax.keep.score import probabilities, window_logits
from kvjax.protocols import Observation, Seen, View


@dataclasses.dataclass(frozen=True)
class Lookback(Word):
    """What a layer's last `last` queries give to tokens that are neither sinks nor recent, for all its slots.

    The first `sinks` and the newest `window` tokens are left out of it; the mean over queries and heads
    (SimLayerKV, arXiv:2410.13846, whose lazy layers are those of a small number). before_each: the `window`
    tokens before each query are left out in place of the newest ones, and a query's own token is not.
    """

    last: int = 1
    sinks: int = 4
    window: int = 1024
    before_each: bool = False

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Seen) -> Float[Array, "B K S"]:
        q_pos = seen.of(Queries(self.last))[1]
        p = probabilities(window_logits(view, seen, self.last))
        between = (view.pos >= self.sinks)[:, :, None]
        if self.before_each:
            age = q_pos[:, None, :, None] - view.pos[:, :, None]
            between &= (age <= 0) | (age > self.window)
        else:
            between &= (view.pos < (seen.length - self.window)[:, None, None])[:, :, None]
        each = jnp.where(between[:, :, None], p, 0.0).sum(-1).mean((1, 2))
        queries = jnp.maximum((q_pos >= 0).sum(-1), 1).astype(each.dtype)
        return jnp.broadcast_to((each.sum(-1) / queries)[:, None, None], view.pos.shape)
