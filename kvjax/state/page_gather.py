"""Gathers pages of a pool into dense slots: simple, and as costly as no compression."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kvjax.ops.attention.union import Keys
from kvjax.state.cache import Paged, Pages
from kvjax.state.codes import dense, lent

T = TypeVar("T")


def in_lists(tree: T, segment: Paged, pool: Pages) -> T:
    """Arrays [P, page, ...] of a pool as [B, K, M * page, ...], for one layer's pages.

    Codes come with the fitted arrays of that layer, which have an axis of its KV heads.
    """
    table = pool.table(segment)
    listed = jax.tree.map(lambda x: x[table].reshape(*table.shape[:2], -1, *x.shape[2:]), tree)
    return lent(listed, segment.taught)


def gather_traces(segment: Paged, pool: Pages) -> dict[str, Float[Array, "B K S"]]:
    """The traces of one layer's pages, in the order of `gather_pages`."""
    return in_lists(pool.traces, segment, pool)


def gather_summary(segment: Paged, pool: Pages) -> dict[str, Array]:
    """What a read method keeps for one layer's pages, [B, K, M * page / granule, ...]."""
    return in_lists(pool.summary, segment, pool)


def gather_pages(segment: Paged, pool: Pages) -> Keys:
    """One layer's pages as dense keys [B, K, M * page, H]."""
    live = jnp.arange(segment.most * pool.page_tokens)[None, None] < segment.lengths[..., None]
    mine = in_lists(dataclasses.replace(pool, traces={}, summary={}), segment, pool)
    # Pages after a head's end may belong to another row, and inf or NaN there times a weight of 0 is NaN.
    v = mine.values()
    v = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    return Keys(dense(mine.k), v, jnp.where(live, mine.pos, -1), mine.bias)
