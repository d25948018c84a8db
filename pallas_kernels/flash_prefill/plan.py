"""Which blocks of slots a block of queries must visit.

Blocks are compared by the smallest and the largest position and segment in them, so unordered slots may be
visited unnecessarily, but are never missed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

UNSEEN, MASKED, WHOLE = 0, 1, 2
FAR = 2**31 - 1


class Sizes(NamedTuple):
    """Static arguments: tokens and slots per block, rows processed at once, and the logits' parameters."""

    q: int
    kv: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    rows: int = 256


class BlockPlan(NamedTuple):
    """kinds [I X, 1, Y]: UNSEEN, MASKED or WHOLE, for each of Y inner blocks of X outer blocks of I heads.

    first, count [I X]: the range of blocks from the first that is not UNSEEN to the last. width: the largest
    count.
    """

    kinds: jax.Array
    first: jax.Array
    count: jax.Array
    width: jax.Array


def block_kinds(q_rows: jax.Array, k_rows: jax.Array, sizes: Sizes) -> jax.Array:
    """Kinds [I, X, Y] of X blocks of queries and Y of slots, from q_rows [B, C, T] and k_rows [I, C, S].

    I = B, or B K if heads differ. Rows: positions, below 0 for none; segments if C = 2.
    """
    lists = k_rows.shape[0] // q_rows.shape[0]
    q = _ranges(q_rows, sizes.q)
    q = [jnp.repeat(x, lists, 0)[:, :, None] for x in q]
    k = [x[:, None] for x in _ranges(k_rows, sizes.kv)]
    (q_all, q_low, q_high, *q_seg), (k_all, k_low, k_high, *k_seg) = q, k
    some = (k_low <= q_high) & (q_high >= 0) & (k_high >= 0)
    every = q_all & k_all & (k_high <= q_low)
    if sizes.window is not None:
        # In a block of empty entries `q_low` is very large, so that subtracting the window cannot overflow.
        some &= k_high > q_low - sizes.window
        every &= k_low > q_high - sizes.window
    if q_seg:
        some &= (q_seg[0] <= k_seg[1]) & (k_seg[0] <= q_seg[1])
        every &= (q_seg[0] == q_seg[1]) & (k_seg[0] == k_seg[1]) & (q_seg[0] == k_seg[0])
    return jnp.where(some, jnp.where(every, WHOLE, MASKED), UNSEEN).astype(jnp.int32)


def _ranges(rows: jax.Array, block: int) -> list[jax.Array]:
    """Per block: whether all entries are real; smallest and largest position, and segment; each [I, X]."""
    count, kinds, length = rows.shape
    rows = rows.reshape(count, kinds, length // block, block)
    real = rows[:, 0] >= 0
    found = [real.all(-1)]
    for n in range(kinds):
        found.append(jnp.where(real, rows[:, n], FAR).min(-1))
        found.append(jnp.where(real, rows[:, n], -1 if n == 0 else -FAR).max(-1))
    return found


def plan(kinds: jax.Array) -> BlockPlan:
    """Build the plan for kinds [I, X, Y], with X outer blocks and Y inner ones."""
    seen = kinds > UNSEEN
    first = jnp.argmax(seen, -1).astype(jnp.int32)
    last = kinds.shape[2] - 1 - jnp.argmax(seen[..., ::-1], -1).astype(jnp.int32)
    count = jnp.where(seen.any(-1), last - first + 1, 0)
    rows = kinds.reshape(-1, 1, kinds.shape[2])
    return BlockPlan(rows, first.reshape(-1), count.reshape(-1), jnp.maximum(count.max(), 1))
