"""Scores by the norms of keys and values."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Observed, Score, View
from kvjax.keep.algebra import Made, Word


@dataclasses.dataclass(frozen=True)
class NormRatio(Word):
    """score[j] = ||v_j||_2 / ||k_j||_2: PagedEviction (arXiv:2509.04377)."""

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        k, v = (jnp.linalg.norm(x.astype(jnp.float32), axis=-1) for x in (view.k, view.v))
        return v / jnp.maximum(k, 1e-8)


@dataclasses.dataclass(frozen=True)
class Rounded(Made):
    """A score rounded to 17 bits, so that equal tokens tie despite the rounding errors of rotation."""

    score: Score

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return jax.lax.reduce_precision(scored(self.score, view, seen), exponent_bits=8, mantissa_bits=16)
