"""Attention within a chunk, without a causal mask."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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


@dataclasses.dataclass(frozen=True)
class ChunkMass(SlotObservation, AccumulatingObservation):
    """sum_i softmax_j(q_i k_j) over the tokens i of j's chunk, averaged over a group's heads.

    The new tokens of a turn are cut into chunks of `chunk`, in which every query sees every key. Older slots
    get 0. There is no 1 / sqrt(H) (Compactor, arXiv:2507.08143, as in its authors' code).
    """

    chunk: int
    phases = (IN_PREFILL, IN_STEP)

    def of(
        self, q: Float[Array, "B N T H"], q_pos: Int[Array, "B T"], k: Float[Array, "B K S H"],
        pos: Int[Array, "B #K S"],
    ) -> Float[Array, "B K S"]:  # fmt: skip
        """Compute attention that new tokens receive. Queries and keys of new tokens are in token order."""
        (b, n, t, h), (heads, slots) = q.shape, k.shape[1:3]
        if t == 1:
            return jnp.broadcast_to(pos == q_pos[:, :, None], (b, heads, slots)).astype(jnp.float32)
        if slots != t:
            return jnp.zeros((b, heads, slots), jnp.float32)
        size = min(self.chunk, t)
        chunks = -(-t // size)
        queries = _cut(q.astype(jnp.float32).reshape(b, heads, n // heads, t, h), 3, size)
        keys, live = _cut(k.astype(jnp.float32), 2, size), _cut(q_pos >= 0, 1, size)

        def one(of_chunk: tuple[Array, Array, Array]) -> Float[Array, "B K size"]:
            """One chunk at a time: all attention maps together are as large as many layers' keys."""
            q, k, live = of_chunk
            s = jnp.einsum("bkgih,bkjh->bkgij", q, k)
            p = jax.nn.softmax(jnp.where(live[:, None, None, None], s, -1e30), -1)
            return jnp.where(live[:, None, None, :, None], p, 0.0).sum(3).mean(2)

        found = jnp.moveaxis(jax.lax.map(one, (queries, keys, live)), 0, 2).reshape(b, heads, chunks * size)
        # `pos` has as many slots as there are new tokens, but older slots among them get 0.
        return jnp.where((pos >= q_pos[:, :1, None]) & (pos >= 0), found[..., :t], 0.0)

    def join(self, old: Float[Array, "*lists S"], new: Float[Array, "*lists S"]) -> Float[Array, "*lists S"]:
        """Combine the values from earlier and from new queries."""
        return old + new


def _cut(x: Array, axis: int, size: int) -> Array:
    """Chunks of `size` along an axis, zero-padded, as a new first axis: [chunks, ..., size, ...]."""
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % size)
    x = jnp.pad(x, pad)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, size, *x.shape[axis + 1 :]), axis, 0)


@dataclasses.dataclass(frozen=True)
class NonCausalAttention(Word):
    """score[j] = ||v_j|| times the attention of `ChunkMass` to j in the turn in which j was read."""

    chunk: int = 128

    @property
    def traces(self) -> frozenset[Trace]:
        return frozenset({AccumulatedMass(ChunkMass(self.chunk))})

    def __call__(self, view: View, seen: Observed) -> Float[Array, "B K S"]:
        mass = view.of(AccumulatedMass(ChunkMass(self.chunk)))
        return mass * jnp.linalg.norm(view.v.astype(jnp.float32), axis=-1)
