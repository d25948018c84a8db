"""Lazy layers: layers whose queries attend only to the first and the newest tokens."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import probabilities, window_logits


@dataclasses.dataclass(frozen=True)
class Lookback(Word):
    """Attention of a layer's last `last` queries to tokens that are neither sinks nor recent.

    The first `sinks` and the newest `window` tokens are excluded. The result is one number for all slots of a
    layer, the mean over queries and heads; SimLayerKV (arXiv:2410.13846) calls layers with a small value
    lazy. before_each: excludes the `window` tokens before each query instead of the newest tokens of the
    text.
    """

    last: int = 1
    sinks: int = 4
    window: int = 1024
    before_each: bool = False

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
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
