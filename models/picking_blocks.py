"""Queries that pick blocks of tokens, by the mean key of each block (mixtures of block attention)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from kvjax.ops.attention.union import NEG_INF, Keys
from kvjax.ops.base.dtypes import wide


class BlockPicking(NamedTuple):
    """Every query picks its own block and the `top` - 1 earlier ones with the largest q mean(k).

    Block i holds positions i * `size` to (i + 1) * `size` - 1. The mean is over a block's stored slots.
    """

    size: int
    top: int

    def alike(self, sets: Sequence[Keys]) -> bool:
        """Whether every query picks all of these slots: there are no more slots than blocks to pick."""
        return sum(s.k.shape[2] for s in sets) <= self.top

    def leave(self, picked: Array) -> None:
        """Publish nothing: no other layer takes picked blocks."""

    def per_query(self) -> dict[str, Array]:
        """Return no fields: queries pick by themselves alone."""
        return {}

    def pick(
        self,
        q: Float[Array, "B N T H"],
        sets: Sequence[Keys],
        pos: Int[Array, "B T"],
        window: int | None = None,
    ) -> tuple[list[Bool[Array, "B N T _"]], Int[Array, "B T 1"]]:
        """Which slots of every set each query head picks. q: rotated, of the dimension of stored keys.

        Of equal blocks the earlier one is picked. window: not used, because such layers have none.
        """
        (b, n, t, _), heads = q.shape, sets[0].k.shape[1]
        places = [jnp.broadcast_to(s.pos, s.k.shape[:3]) for s in sets if s.pos is not None]
        ends = [int(x) for x in np.cumsum([p.shape[2] for p in places])[:-1]]
        blocks = jnp.where((at := jnp.concatenate(places, -1)) >= 0, at // self.size, -1)
        # Slots are unordered and positions unbounded, so blocks are numbered by their first slot in order.
        of_slot = jax.vmap(jax.vmap(jnp.searchsorted))(jnp.sort(blocks, -1), blocks)
        means, number = _means(sets, jnp.split(of_slot, ends, -1), of_slot, blocks)
        grouped = q.reshape(b, heads, -1, t, q.shape[-1]).astype(means.dtype)
        score = jax.lax.stop_gradient(jnp.einsum("bkgth,bkmh->bkgtm", grouped, means))
        own = (pos // self.size)[:, None, None, :, None]
        earlier = (number >= 0)[:, :, None, None] & (number[:, :, None, None] < own)
        hit = _best(jnp.where(earlier, score, NEG_INF), self.top - 1)
        taken = jnp.take_along_axis(hit, of_slot[:, :, None, None], -1) | (blocks[:, :, None, None] == own)
        return jnp.split(taken.reshape(b, n, t, -1), ends, -1), jnp.zeros((b, t, 1), jnp.int32)


def _means(
    sets: Sequence[Keys], parts: Sequence[Int[Array, "B K _"]], of_slot: Int[Array, "B K S"],
    blocks: Int[Array, "B K S"],
) -> tuple[Float[Array, "B K S H"], Int[Array, "B K S"]]:  # fmt: skip
    """Compute the mean key of every block, and its number; -1 for entries that are no block."""
    b, k, s = of_slot.shape
    live = (blocks >= 0).astype(jnp.int32)

    def scatter(to: Array, at: Array, x: Array, largest: bool = False) -> Array:
        def one(to: Array, at: Array, x: Array) -> Array:
            return to.at[at].max(x) if largest else to.at[at].add(x)

        return jax.vmap(jax.vmap(one))(to, at, x)

    dtype = wide(sets[0].k)
    total = jnp.zeros((b, k, s, sets[0].k.shape[-1]), dtype)
    for keys, at in zip(sets, parts, strict=True):
        held = jnp.broadcast_to(keys.pos, at.shape) if keys.pos is not None else at
        total = scatter(total, at, jnp.where((held >= 0)[..., None], keys.k.astype(dtype), 0))
    count = scatter(jnp.zeros((b, k, s), jnp.int32), of_slot, live)
    number = scatter(jnp.full((b, k, s), -1, jnp.int32), of_slot, blocks.astype(jnp.int32), largest=True)
    return total / jnp.maximum(count, 1)[..., None].astype(dtype), number


def _best(score: Float[Array, "B K G T M"], top: int) -> Bool[Array, "B K G T M"]:
    """Which entries are among the `top` largest, and not -inf."""
    best, at = jax.lax.top_k(score, min(top, score.shape[-1]))
    hit = jnp.zeros(score.shape, bool)
    return jnp.put_along_axis(hit, at, best > NEG_INF, -1, inplace=False)
