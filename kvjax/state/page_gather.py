"""Gathers pages of a pool into dense slots: simple, and as costly as no compression."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention.union import Keys
from kvjax.ops.base.memory import to_device
from kvjax.state.cache import Paged, Pages
from kvjax.state.codes import dense, with_arrays

T = TypeVar("T")


def in_lists(tree: T, segment: Paged, pool: Pages) -> T:
    """Arrays [P, page, ...] of a pool as [B, K, M * page, ...], for one layer's pages.

    Codes come with the fitted arrays of that layer, which have an axis of its KV heads.
    """
    table = pool.table(segment)
    listed = jax.tree.map(lambda x: x[table].reshape(*table.shape[:2], -1, *x.shape[2:]), tree)
    return with_arrays(listed, segment.codec_arrays)


def gather_traces(segment: Paged, pool: Pages) -> dict[str, Float[Array, "B K S"]]:
    """Gather the traces of one layer's pages, in the order of `gather_pages`."""
    return in_lists(pool.traces, segment, pool)


def gather_summary(segment: Paged, pool: Pages) -> dict[str, Array]:
    """Gather the read method's summaries of one layer's pages, [B, K, M * page / granule, ...]."""
    return in_lists(pool.summary, segment, pool)


def page_positions(segment: Paged, pool: Pages) -> Int[Array, "B K S"]:
    """Gather the positions of one layer's pages, in the order of `gather_pages`."""
    pos = in_lists(pool.pos, segment, pool)
    slot = jnp.arange(pos.shape[-1], dtype=jnp.int32)[None, None]
    return jnp.where(slot < segment.lengths[..., None], pos, -1)


def first_page(segment: Paged, pool: Pages) -> Int[Array, ""]:
    """Where the pages of one layer start that are copied from host memory, `pool.far` of them."""
    return jnp.minimum(segment.first.reshape(-1)[0], pool.owner.shape[0] - pool.far)


def layer_on_device(segment: Paged, pool: Pages, layer: int | Array = 0) -> Pages:
    """One layer's pages of a pool in host memory, on the device, as a pool of their own.

    segment: of this layer alone. layer: its number in the pool, by which owners are counted anew.
    """
    lists, start = segment.first.size, first_page(segment, pool)
    mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, pool.far), pool)
    k, v, owner = to_device(mine.k), to_device(mine.v), mine.owner - layer * lists
    owner = jnp.where((owner >= 0) & (owner < lists) & (mine.owner >= 0), owner, -1)
    return dataclasses.replace(mine, k=k, v=v, owner=owner, layers=1, far=0)


def in_layer(segment: Paged, pool: Pages) -> Paged:
    """One layer's segment of a pool in host memory as one of the pool that `layer_on_device` makes."""
    return dataclasses.replace(segment, first=segment.first - first_page(segment, pool), first_layer=0)


def gather_pages(segment: Paged, pool: Pages) -> Keys:
    """One layer's pages as dense keys [B, K, M * page, H]."""
    if pool.far:
        segment, pool = in_layer(segment, pool), layer_on_device(segment, pool)
    live = jnp.arange(segment.most * pool.page_tokens)[None, None] < segment.lengths[..., None]
    mine = in_lists(dataclasses.replace(pool, traces={}, summary={}), segment, pool)
    # Pages after a head's end may belong to another row, and inf or NaN there times a weight of 0 is NaN.
    v = mine.values()
    v = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    return Keys(dense(mine.k), v, jnp.where(live, mine.pos, -1), mine.bias)
