"""Scores by hashes: keys whose sign codes are close to that of the newest query."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.grammar.kinds import Observation, Observed, View
from kvjax.keep.algebra import Word
from kvjax.keep.observations.observe import Queries
from kvjax.ops.base.lsh import hyperplanes


@dataclasses.dataclass(frozen=True)
class HashSimilarity(Word):
    """score[j] = -hamming(sign(R k_j), sign(R q)) of the newest query q, R Gaussian [bits, H].

    It grows with the cosine of q and k_j (arXiv:2412.16187). Query heads of a group are summed. All heads
    and layers share R, which is drawn from `seed`.
    """

    bits: int = 16
    seed: int = 0

    @property
    def needs(self) -> frozenset[Observation]:
        return frozenset({Queries(1)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        q, _ = seen.of(Queries(1))
        width = view.k.shape[-1]
        normals = jnp.asarray(hyperplanes(width, self.bits, 1, self.seed), jnp.float32)
        side = lambda x: jnp.where(x.astype(jnp.float32) @ normals > 0, 1.0, -1.0)  # noqa: E731
        asked = side(q[:, :, 0]).reshape(*view.pos.shape[:2], -1, self.bits)
        agreed = jnp.einsum("bkgp,bksp->bks", asked, side(view.k))
        # Bits that agree minus bits that differ, over a group.
        return (agreed - self.bits * asked.shape[2]) / 2
