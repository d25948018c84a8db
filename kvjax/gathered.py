"""Pages of a pool as slots of their lists: simple, and as costly as no compression."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.cache import Paged, Pages
from kvjax.codes import dense
from kvjax.ops.attention.union import Keys


def gather_traces(segment: Paged, pool: Pages) -> dict[str, Float[Array, "B K S"]]:
    """What is remembered of the slots of one layer's pages, in the order of `gather_pages`."""
    return {name: x[segment.table].reshape(*segment.table.shape[:2], -1) for name, x in pool.traces.items()}


def gather_pages(segment: Paged, pool: Pages) -> Keys:
    """One layer's pages as dense keys [B, K, M * page, H]."""
    b, k, m = segment.table.shape
    page = pool.page_tokens
    live = jnp.arange(m * page)[None, None] < segment.lengths[..., None]

    mine = jax.tree.map(lambda leaf: leaf[segment.table], dataclasses.replace(pool, traces={}))

    def flat(x: Array) -> Array:
        return x.reshape(b, k, m * page, -1)

    pos = jnp.where(live, mine.pos.reshape(b, k, -1), -1)
    bias = None if mine.bias is None else mine.bias.reshape(b, k, -1)
    # Pages behind a list's end may belong to another row, and inf or NaN there times a weight of 0 is NaN.
    v = flat(mine.values())
    return Keys(flat(dense(mine.k)), jnp.where(live[..., None], v, jnp.zeros((), v.dtype)), pos, bias)
