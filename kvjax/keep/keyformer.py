"""Keyformer's score: attention that is drawn with noise, so that what has left counts among what may come."""

from __future__ import annotations

import dataclasses
from typing import NoReturn

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.keep.algebra import Word
from kvjax.keep.score import STRIP, probabilities
from kvjax.keep.trace import Received
from kvjax.protocols import Inputs, Seen, Trace, View
from kvjax.words import IN_PREFILL, IN_STEP


@dataclasses.dataclass(frozen=True)
class NoisyMass:
    """sum_i softmax_j((q_i k_j / sqrt(H) + z_j) / tau_i), over a group's heads and new queries i.

    z_j is a draw of the standard Gumbel distribution by seed, head and position; tau_i rises from `tau` to
    `tau_end` over the first `horizon` positions of a text (Keyformer, arXiv:2403.09054, section 3). What was
    held before new tokens came, and these, have a softmax each.
    """

    tau: float = 1.0
    tau_end: float = 2.0
    horizon: int = 2048
    seed: int = 0
    phases = (IN_PREFILL, IN_STEP)

    def of(
        self, q: Float[Array, "B N T H"], q_pos: Int[Array, "B T"], k: Float[Array, "B K S H"],
        pos: Int[Array, "B #K S"],
    ) -> Float[Array, "B K S"]:  # fmt: skip
        """What new queries give slots, a strip of queries at a time."""
        (b, n, t, h), (heads, slots) = q.shape, k.shape[1:3]
        pos = jnp.broadcast_to(pos, (b, heads, slots))
        keys, noise, size = k.astype(jnp.float32), self.noise(pos), min(STRIP, t)
        grouped = q.astype(jnp.float32).reshape(b, heads, n // heads, t, h) * h**-0.5
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, -t % size), (0, 0)))
        padded = jnp.pad(q_pos, ((0, 0), (0, -t % size)), constant_values=-1)
        warmth = self.tau + (self.tau_end - self.tau) * jnp.minimum(padded / self.horizon, 1.0)

        def add(i: int | Array, total: Float[Array, "B K S"]) -> Float[Array, "B K S"]:
            mine = jax.lax.dynamic_slice_in_dim(grouped, i * size, size, 3)
            at, tau = (jax.lax.dynamic_slice_in_dim(x, i * size, size, 1) for x in (padded, warmth))
            s = jnp.einsum("bkgth,bksh->bkgts", mine, keys) + noise[:, :, None, None]
            sees = (pos[:, :, None] >= 0) & (pos[:, :, None] <= at[:, None, :, None])
            s = jnp.where(sees[:, :, None], s / tau[:, None, None, :, None], -jnp.inf)
            return total + probabilities(s).sum((2, 3))

        return jax.lax.fori_loop(0, -(-t // size), add, jnp.zeros((b, heads, slots)))

    def noise(self, pos: Int[Array, "B K S"]) -> Float[Array, "B K S"]:
        """The draws of slots; a row has the same ones alone and in a batch."""

        def head(number: Array, pos: Array) -> Array:
            key = jax.random.fold_in(jax.random.key(self.seed), number)
            return jax.vmap(lambda p: jax.random.gumbel(jax.random.fold_in(key, p)))(pos)

        return jax.vmap(jax.vmap(head), in_axes=(None, 0))(jnp.arange(pos.shape[1]), pos)

    def join(self, old: Float[Array, "*lists S"], new: Float[Array, "*lists S"]) -> Float[Array, "*lists S"]:
        """Of earlier and of new queries together."""
        return old + new

    def __call__(self, inputs: Inputs) -> NoReturn:
        raise TypeError("noisy attention is computed where queries and slots meet, with `of`")


@dataclasses.dataclass(frozen=True)
class NoisyAttention(Word):
    """All the noisy attention that a slot has received so far: see `NoisyMass`."""

    looks = False

    mass: NoisyMass = NoisyMass()

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({Received(self.mass)})

    def __call__(self, view: View, seen: Seen) -> Float[Array, "B K S"]:
        return view.of(Received(self.mass))
