"""Keyformer's score: attention with Gumbel noise, which allows for the tokens that are already evicted."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from kvjax.grammar.kinds import (
    IN_PREFILL,
    IN_STEP,
    AccumulatingObservation,
    Observed,
    SlotObservation,
    Trace,
    View,
)
from kvjax.keep.algebra import Word
from kvjax.keep.observations.trace import AccumulatedMass
from kvjax.keep.scores.score import STRIP, probabilities


def gumbel(bits: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """Draw from the standard Gumbel distribution for every 32 random bits; always finite.

    Of 23 bits, (bits + 1/2) / 2^23 is exact in float32. With one bit more, the largest would round to 1 and
    its noise be infinite, which happens a few times in every prompt of a thousand tokens.
    """
    uniform = ((bits >> 9).astype(jnp.float32) + 0.5) * 2.0**-23
    return -jnp.log(-jnp.log(uniform))


@dataclasses.dataclass(frozen=True)
class NoisyMass(SlotObservation, AccumulatingObservation):
    """sum_i softmax_j((q_i k_j / sqrt(H) + z_ij) / tau_i), over a group's heads and new queries i.

    z_ij is drawn from the standard Gumbel distribution, independently for every query, key, head and layer,
    as in the authors' code; tau_i rises from `tau` to `tau_end` over the first `horizon` positions of a text
    (Keyformer, arXiv:2403.09054, section 3). Slots that were cached before and new tokens have a softmax
    each.
    """

    tau: float = 1.0
    tau_end: float = 2.0
    horizon: int = 2048
    seed: int = 0
    phases = (IN_PREFILL, IN_STEP)
    by_layer = True

    def of(
        self, q: Float[Array, "B N T H"], q_pos: Int[Array, "B T"], k: Float[Array, "B K S H"],
        pos: Int[Array, "B #K S"], layer: int | Int[Array, ""] = 0,
    ) -> Float[Array, "B K S"]:  # fmt: skip
        """Compute the attention that slots receive from new queries, for a strip of queries at a time."""
        (b, n, t, h), (heads, slots) = q.shape, k.shape[1:3]
        pos = jnp.broadcast_to(pos, (b, heads, slots))
        keys, size = k.astype(jnp.float32), min(STRIP, t)
        grouped = q.astype(jnp.float32).reshape(b, heads, n // heads, t, h) * h**-0.5
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, -t % size), (0, 0)))
        padded = jnp.pad(q_pos, ((0, 0), (0, -t % size)), constant_values=-1)
        warmth = self.tau + (self.tau_end - self.tau) * jnp.minimum(padded / self.horizon, 1.0)

        def add(i: int | Array, total: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
            mine = jax.lax.dynamic_slice_in_dim(grouped, i * size, size, 3)
            at, tau = (jax.lax.dynamic_slice_in_dim(x, i * size, size, 1) for x in (padded, warmth))
            s = jnp.einsum("bkgth,bksh->bkgts", mine, keys)
            s += self.draws(at, pos, n, layer).reshape(s.shape)
            sees = (pos[:, :, None] >= 0) & (pos[:, :, None] <= at[:, None, :, None])
            s = jnp.where(sees[:, :, None], s / tau[:, None, None, :, None], -jnp.inf)
            return total + probabilities(s).sum((2, 3))

        return jax.lax.fori_loop(0, -(-t // size), add, jnp.zeros((b, heads, slots), jnp.float32))

    def draws(
        self, q_pos: Int[Array, "B T"], pos: Int[Array, "B K S"], heads: int, layer: int | Int[Array, ""] = 0
    ) -> Float[Array, "B N T S"]:
        """Draw the noise z, by (seed, layer, head, query, key) alone, so rows draw the same in any batch."""
        of_layer = jax.random.fold_in(jax.random.key(self.seed, impl="threefry2x32"), layer)
        fold = jax.random.fold_in

        def pair(key: Array, query: Array, slots: Array) -> Float[Array, "S"]:
            # The folded key itself is the random number: one hash per pair.
            bits = jax.random.key_data(jax.vmap(fold, (None, 0))(fold(key, query), slots))[:, 0]
            return gumbel(bits)

        keys = jax.vmap(fold, (None, 0))(of_layer, jnp.arange(heads, dtype=jnp.int32))
        of_queries = jax.vmap(pair, (None, 0, None))
        of_heads = jax.vmap(of_queries, (0, None, 0))
        slots = jnp.repeat(pos, heads // pos.shape[1], axis=1)
        return jax.vmap(of_heads, (None, 0, 0))(keys, q_pos, slots)

    def join(self, old: Float[Array, "*lists S"], new: Float[Array, "*lists S"]) -> Float[Array, "*lists S"]:
        """Combine the values from earlier and from new queries."""
        return old + new


@dataclasses.dataclass(frozen=True)
class NoisyAttention(Word):
    """The accumulated noisy attention of a slot: see `NoisyMass`."""

    looks = False

    mass: NoisyMass = NoisyMass()

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(self.mass)})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        return view.of(AccumulatedMass(self.mass))
