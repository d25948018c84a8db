"""Scores tokens by how many bits their codes need for attention's errors to stay below a bound (QAQ)."""

from __future__ import annotations

import dataclasses
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import probabilities, window_logits


@dataclasses.dataclass(frozen=True)
class NeededBits(Word):
    """The bits that token j's key or value needs, whichever needs more (QAQ, arXiv:2403.04643, section 3).

    ceil(log2(r / (2 e) + 1)) for numbers of range r that may each err by e. With a_j, the largest attention
    of the last `last` queries and the heads of a group to token j, T tokens and the largest number q of these
    queries: e = sqrt(value_error) / (T a_j) for a value, and e = sqrt(key_error / H) / (T q x_j) for a key,
    x_j = max_i |diag(a) - a a'|_ij. The largest numbers of a row, the share `outliers`, do not count in r.
    """

    last: int
    key_error: float
    value_error: float
    outliers: float = 0.0

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        queries, at = seen.of(Queries(self.last))
        queries = jnp.where((at >= 0)[:, None, :, None], jnp.abs(queries.astype(jnp.float32)), 0.0)
        largest = queries.reshape(*view.pos.shape[:2], -1).max(-1, keepdims=True)
        a = probabilities(window_logits(view, seen, self.last)).max((2, 3))
        top = jnp.sort(a, axis=-1)[..., -2:]
        # The largest attention to another token.
        other = jnp.where(a == top[..., 1:], top[..., :1], top[..., 1:])
        tokens = seen.length.astype(jnp.float32)[:, None, None]
        moved = a * jnp.maximum(1 - a, other)
        of_key = (self.key_error / view.k.shape[-1]) ** 0.5 / (tokens * largest * moved)
        of_value = self.value_error**0.5 / (tokens * a)
        return jnp.maximum(self._bits(view.k, of_key), self._bits(view.v, of_value))

    def _bits(self, x: Float[Array, "B K S H"], error: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
        x = x.astype(jnp.float32)
        if self.outliers:
            # As many as `kvjax.store.outliers.Outliers` keeps.
            count = min(x.shape[-1], math.ceil(round(self.outliers * x.shape[-1], 9)))
            inside = jnp.abs(x) < jnp.sort(jnp.abs(x), axis=-1)[..., -count, None]
            high, low = (jnp.where(inside, y, -jnp.inf).max(-1) for y in (x, -x))
            size = jnp.maximum(high + low, 0.0)
        else:
            size = x.max(-1) - x.min(-1)
        return jnp.ceil(jnp.log2(size / (2 * error) + 1))
