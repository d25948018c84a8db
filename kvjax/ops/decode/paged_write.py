"""Writes many new tokens of every KV head into a pool of pages at once; touched pages are rewritten whole."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from kvjax.ops.base.row_scatter import scatter_rows
from kvjax.ops.decode.page_pool import PER_CHANNEL, PagePool, make_pool


def paged_write(
    pool: PagePool,
    table: Int[Array, "B K M"],
    starts: Int[Array, "B K"],
    counts: Int[Array, "B"],
    k: Num[Array, "B K T H"],
    v: Num[Array, "B K T H"],
    layer: int | Int[Array, ""] = 0,
    *,
    numbers: Mapping[str, Float[Array, "B K T"]] | None = None,
) -> PagePool:
    """Write the first `counts` of T tokens to the pool in every KV head, from slot `starts` on.

    As `paged_append`, for many tokens of a KV head: pages that they touch are read, completed and written
    back whole, so that tokens which share a word or a row of numbers do not overwrite each other. Tokens
    beyond the table's pages are not stored. No two KV heads may write into the same page.

    numbers: the tokens' numbers by name ("pos", "key_scale", ...). Raises ValueError if these are not the
    pool's, and if a pool has scales per channel.

    >>> pages, table = jnp.zeros((1, 3, 4, 1)), jnp.asarray([[[2, 0]]])
    >>> new = jnp.arange(1.0, 4.0).reshape(1, 1, 3, 1)
    >>> pool = paged_write(make_pool(pages, pages), table, jnp.asarray([[3]]), jnp.asarray([3]), new, new)
    >>> pool.keys[0, 2, :, 0].tolist(), pool.keys[0, 0, :, 0].tolist()
    ([0.0, 0.0, 0.0, 1.0], [2.0, 3.0, 0.0, 0.0])
    """
    given = numbers or {}
    if set(given) != set(pool.names) or set(given) & set(PER_CHANNEL):
        raise ValueError(
            f"numbers given for {sorted(given) or 'none'}, expected one for each of the pool's: "
            f"{', '.join(pool.names) or 'none'}, none of them of channels"
        )
    (b, heads, tokens, width), page, most = k.shape, pool.page, table.shape[2]
    touched = (tokens + page - 2) // page + 1
    piece = jnp.arange(touched, dtype=jnp.int32)[None, None]
    first, offset = starts // page, starts % page
    at = first[..., None] + piece
    pages = jnp.take_along_axis(table, jnp.minimum(at, most - 1), 2)
    last = offset + counts[:, None]
    writes = (piece * page < last[..., None]) & (counts > 0)[:, None, None] & (at < most)
    index = jnp.asarray(layer, jnp.int32) * pool.words.shape[1] + pages
    words = pool.words.reshape(-1, *pool.words.shape[2:])
    there = words[jnp.where(writes, index, 0).reshape(-1)]
    old = dataclasses.replace(pool, words=there.reshape(b * heads, touched, *there.shape[1:]))
    slot = jnp.arange(touched * page, dtype=jnp.int32)[None, None] - offset[..., None]
    new = ((slot >= 0) & (slot < counts[:, None, None])).reshape(b * heads, -1)
    slot = jnp.clip(slot, 0, tokens - 1).reshape(b * heads, -1)

    def written(x: Num[Array, "B K T H"], held: Num[Array, "L P page W"]) -> Num[Array, "L P page W"]:
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, pool.width - width),)).reshape(b * heads, tokens, -1)
        return _put(x.astype(held.dtype), held, slot, new).astype(jnp.dtype(pool.payload))

    side = {
        name: _put(given[name].astype(jnp.float32).reshape(b * heads, tokens), old.number(name), slot, new)
        for name in pool.names
    }
    made = make_pool(written(k, old.keys), written(v, old.values), packed=pool.packed, **side).words
    # A pool's pages may have more rows than they need, or fewer than whole tiles of a TPU's memory.
    rows = pool.words.shape[2]
    made = jnp.pad(made[:, :, :rows], ((0, 0), (0, 0), (0, max(rows - made.shape[2], 0)), (0, 0)))
    index = jnp.where(writes, index, np.iinfo(np.int32).max).reshape(-1).astype(jnp.int32)
    done = scatter_rows(words, index, made.reshape(-1, *made.shape[2:]))
    return dataclasses.replace(pool, words=done.reshape(pool.words.shape))


def _put(
    x: Num[Array, "L T *w"], held: Num[Array, "L P page *w"], slot: Int[Array, "L S"], new: Bool[Array, "L S"]
) -> Num[Array, "L P page *w"]:
    """Put tokens of x into the new slots of the contents of pages."""
    more = (1,) * (x.ndim - 2)
    found = jnp.take_along_axis(x, slot.reshape(*slot.shape, *more), 1)
    whole = held.reshape(held.shape[0], -1, *held.shape[3:])
    return jnp.where(new.reshape(*new.shape, *more), found, whole).reshape(held.shape)
