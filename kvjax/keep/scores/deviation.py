"""Scores by how much the attention that a slot receives varies over queries."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.kinds import Observation, Observed, Trace, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.keep.observations.trace import AccumulatedMass


@dataclasses.dataclass(frozen=True)
class AttentionDeviation(Word):
    """score[j] = sqrt(mean p_ij^2 - (mean p_ij)^2) over all queries i since slot j (arXiv:2402.06262).

    The means run over the heads of a group, too. The newest `newest` tokens, which few queries can have seen,
    score infinity.
    """

    looks = False

    newest: int = 10

    @property
    def needs(self) -> frozenset[Observation]:
        # The observation's shape says how many query heads share a KV head.
        return frozenset({Queries(1)})

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(Mass("sum")), AccumulatedMass(Mass("squares"))})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        q, _ = seen.of(Queries(1))
        queries = jnp.maximum(seen.length[:, None, None] - view.pos, 1) * (q.shape[1] // view.pos.shape[1])
        mean, square = (
            view.of(AccumulatedMass(Mass(reduce))) / queries.astype(jnp.float32)
            for reduce in ("sum", "squares")
        )
        deviation = jnp.sqrt(jnp.maximum(square - mean * mean, 0.0))
        return jnp.where(view.pos >= (seen.length - self.newest)[:, None, None], jnp.inf, deviation)
