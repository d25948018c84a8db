"""Gathers pages of a pool into dense slots: simple, and as costly as no compression."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.attention.union import Keys
from kvjax.state.cache import Paged, Pages
from kvjax.state.codes import dense


def gather_traces(segment: Paged, pool: Pages) -> dict[str, Float[Array, "B K S"]]:
    """The traces of one layer's pages, in the order of `gather_pages`."""
    table, lists = pool.table(segment), segment.lengths.shape
    return {name: x[table].reshape(*lists, -1) for name, x in pool.traces.items()}


def gather_summary(segment: Paged, pool: Pages) -> dict[str, Array]:
    """What a read method keeps for one layer's pages, [B, K, M * page / granule, ...]."""
    table, lists = pool.table(segment), segment.lengths.shape
    return {name: x[table].reshape(*lists, -1, *x.shape[2:]) for name, x in pool.summary.items()}


def gather_pages(segment: Paged, pool: Pages) -> Keys:
    """One layer's pages as dense keys [B, K, M * page, H]."""
    b, k = segment.lengths.shape
    most, table = segment.most * pool.page_tokens, pool.table(segment)
    live = jnp.arange(most)[None, None] < segment.lengths[..., None]

    mine = jax.tree.map(lambda leaf: leaf[table], dataclasses.replace(pool, traces={}, summary={}))

    def flat(x: Array) -> Array:
        return x.reshape(b, k, most, -1)

    pos = jnp.where(live, mine.pos.reshape(b, k, -1), -1)
    bias = None if mine.bias is None else mine.bias.reshape(b, k, -1)
    # Pages after a head's end may belong to another row, and inf or NaN there times a weight of 0 is NaN.
    v = flat(mine.values())
    return Keys(flat(dense(mine.k)), jnp.where(live[..., None], v, jnp.zeros((), v.dtype)), pos, bias)
