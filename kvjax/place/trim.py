"""Pools cut to the pages in use, if only the data says how many these are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.hosts.arrays import fetch
from kvjax.ops.base.memory import there
from kvjax.state.cache import Cache, Paged
from kvjax.state.codes import at_layer


def counted(method: Any) -> bool:
    """Whether the number of pages in use depends on the data.

    If scores alone decide how many slots stay, or which of several pools, of layers that are encoded
    differently, they are in.
    """

    def one(method: Any) -> bool:
        if method.keep is None:
            return False
        allocate, store = method.keep.allocate, method.store
        apart = store is not None and (store.keys, store.values) != tuple(
            at_layer(codec, 0) for codec in (store.keys, store.values)
        )
        return allocate.threshold is not None or (apart and allocate.across_layers and not allocate.uniform)

    return any(map(one, method.sentences))


def trimmed(cache: Cache, bucket: Callable[[int], int]) -> Cache:
    """Trim the cache to pools of bucket(pages in use) pages, and heads of bucket(most of a head) pages.

    bucket: rounds a number up to a static size, so that caches of similar texts share their programs. It
    reads from the device once.
    """
    kept = []
    pools = []
    for pool in cache.pools:
        used = int((fetch(pool.owner) >= 0).sum())
        # Pages are in the order of their owners, followed by the free ones.
        kept.append(min(bucket(max(used, 1)), pool.owner.shape[0]))
        cut = jax.tree.map(partial(there, lambda x, n=kept[-1]: x[:n]), pool)
        pools.append(dataclasses.replace(cut, far=min(pool.far, kept[-1])))

    def cut_table(segment: Paged) -> Paged:
        page, last = cache.pools[segment.pool].page_tokens, kept[segment.pool] - 1
        longest = -(-int(fetch(segment.lengths).max(initial=0)) // page)
        most = min(bucket(max(longest, 1)), segment.most)
        return dataclasses.replace(segment, first=jnp.minimum(segment.first, last), most=most)

    groups = tuple(
        dataclasses.replace(
            group, bodies=tuple(cut_table(s) if isinstance(s, Paged) else s for s in group.bodies)
        )
        for group in cache.groups
    )
    return dataclasses.replace(cache, groups=groups, pools=tuple(pools))
