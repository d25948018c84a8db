"""Random selection: a score plus Gumbel noise, so that the best slots are a random draw."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.calls import scored
from kvjax.grammar.kinds import Observed, Score, View
from kvjax.keep.algebra import Made
from kvjax.keep.scores.score import RandomScore


@dataclasses.dataclass(frozen=True)
class GumbelTopK(Made):
    """score[j] - log(-log u_j) with u_j uniform, so that the n best slots are n draws without replacement.

    At every draw, the probability of a slot is proportional to exp(score) among those not drawn yet (Gumbel's
    trick, arXiv:1903.06059). u_j depends on seed, layer, head and position alone (`RandomScore`).
    """

    score: Score
    seed: int = 0

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        # Clipped, because log(-log u) is not finite at 0 and 1.
        u = jnp.clip(RandomScore(self.seed)(view, seen), 1e-9, 1 - 1e-7)
        return scored(self.score, view, seen) - jnp.log(-jnp.log(u))
