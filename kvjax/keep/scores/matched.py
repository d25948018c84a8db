"""Attention that slots receive from reference queries, without a causal mask (Attention Matching)."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Queries
from kvjax.keep.scores.score import probabilities
from kvjax.ops.attention.union import Keys, logits


@dataclasses.dataclass(frozen=True)
class RootMeanSquare(Word):
    """score[j] = sqrt(mean_i p_ij^2) over the last `last` queries and the heads of a group.

    p_ij = softmax_j(q_i k_j / sqrt(H)) over all slots, those of later tokens included: the queries stand for
    later ones, which see all (arXiv:2602.16284).
    """

    last: int

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(self.last)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        s, real = reference_logits(view, seen, self.last)
        p = jnp.where(real[..., None], probabilities(s), 0.0)
        many = jnp.maximum(real.sum(2), 1).astype(p.dtype)
        return jnp.sqrt(jnp.square(p).sum(2) / many[..., None])


def reference_logits(
    view: View, seen: Observed, last: int
) -> tuple[Float[Array, "B K R S"], Bool[Array, "B 1 R"]]:
    """Logits of the last queries of all heads of a group, to all slots, and which of these queries are.

    -inf where a slot is empty; R = G W.
    """
    q, q_pos = seen.of(Queries(last))
    keys = Keys(view.k, view.v, view.pos, view.bias)
    # A position after all tokens, which hides none.
    end = jnp.broadcast_to(seen.length[:, None], q_pos.shape).astype(q_pos.dtype)
    s = logits(q, keys, end, scale=seen.attention.scale, softcap=seen.attention.softcap)
    b, heads, group, many, slots = s.shape
    real = jnp.broadcast_to((q_pos >= 0)[:, None, None], (b, 1, group, many)).reshape(b, 1, -1)
    return s.reshape(b, heads, group * many, slots), real
