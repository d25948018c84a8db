"""The slots of the pages of a body that a read method picks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.ops.attention.union import Keys
from kvjax.ops.decode.picked_decode import picked
from kvjax.state.cache import Paged, Pages, Slots
from kvjax.state.codes import Codes, dense, with_arrays
from kvjax.state.page_gather import in_lists


def visited(
    body: Slots, layer: int | Array, page: int, pages: Int[Array, "B K M"], counts: Int[Array, "B K"]
) -> Slots:
    """Gather the slots of the first `counts` of `pages` in one layer; their arrays have no Lg axis.

    Codes that span more tokens than a page has are decoded first.
    """

    def pick(x: Array) -> Array:
        # Arrays with one number per slot are sliced to their layer first: an index into all layers at once
        # would re-lay them out as a whole, in other tiles.
        x, at = (x, layer) if x.ndim > 4 else (x[layer][None], 0)
        return picked(x, pages, at, x.shape[3] * page // body.capacity)

    def of_rows(x: Array | Codes | None) -> Array | Codes | None:
        if isinstance(x, Codes) and page % x.codec.granule:
            return picked(dense(jax.tree.map(lambda a: a[layer][None], x)), pages, 0, page)
        if not isinstance(x, Codes):
            return None if x is None else pick(x)
        return dataclasses.replace(
            x, data=jax.tree.map(pick, x.data), codec_arrays=jax.tree.map(lambda a: a[layer], x.codec_arrays)
        )

    k, v, bias = map(of_rows, (body.k, body.v, body.bias))
    return dataclasses.replace(body, k=k, v=v, pos=positions(body, layer, page, pages, counts), bias=bias)


def visited_of_lists(
    lists: Paged, pool: Pages, page: int, pages: Int[Array, "B K M"], counts: Int[Array, "B K"]
) -> Keys:
    """Gather the slots of the first `counts` of `pages` of one layer, whose slots are in a pool.

    A page of the pool holds several pages of `page` slots, side by side.
    """
    each = pool.page_tokens // page
    place = jnp.take_along_axis(pool.table(lists), pages // each, axis=2) * each + pages % each

    def pick(x: Array) -> Array:
        blocks = x.reshape(x.shape[0] * each, x.shape[1] // each, *x.shape[2:])[place]
        return blocks.reshape(*place.shape[:2], -1, *x.shape[2:])

    slot = pages[..., None] * page + _within(page)
    used = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None] < counts[..., None]
    live = (used[..., None] & (slot < lists.lengths[..., None, None])).reshape(*pages.shape[:2], -1)

    def of_rows(x: Array | Codes) -> Array:
        if isinstance(x, Codes) and page % x.codec.granule:
            return picked(dense(in_lists(x, lists, pool))[None], pages, 0, page)
        return dense(with_arrays(jax.tree.map(pick, x), lists.codec_arrays))

    pos, bias = jax.tree.map(pick, (pool.pos, pool.bias))
    k = of_rows(pool.k)
    v = k[..., : pool.shared] if pool.v is None else of_rows(pool.v)
    # Pages of another KV head may hold inf or NaN, and that times a weight of 0 is NaN.
    v = jnp.where(live[..., None], v, jnp.zeros((), v.dtype))
    return Keys(k, v, jnp.where(live, pos, -1), bias)


def spread(
    x: Float[Array, "B K P"], page: int, pages: Int[Array, "B K M"], counts: Int[Array, "B K"], slots: int
) -> Float[Array, "B K S"]:
    """Spread numbers of the slots in the first `counts` of `pages` over all `slots`, with 0 elsewhere.

    >>> pages, counts = jnp.asarray([[[2, 0]]]), jnp.asarray([[1]])
    >>> spread(jnp.asarray([[[5.0, 6.0, 7.0, 8.0]]]), 2, pages, counts, 6).tolist()
    [[[0.0, 0.0, 0.0, 0.0, 5.0, 6.0]]]
    """
    used = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None] < counts[..., None]
    place = jnp.where(used, pages, slots // page)[..., None] * page + _within(page)
    put = jax.vmap(jax.vmap(lambda at, new: jnp.zeros(slots, x.dtype).at[at].set(new, mode="drop")))
    return put(place.reshape(x.shape), x)


def positions(
    body: Slots, layer: int | Array, page: int, pages: Int[Array, "B K M"], counts: Int[Array, "B K"]
) -> Int[Array, "B K S"]:
    """Return the positions of slots in the first `counts` of `pages`; -1 for slots of other pages."""
    used = jnp.arange(pages.shape[2], dtype=jnp.int32)[None, None] < counts[..., None]
    return jnp.where(jnp.repeat(used, page, axis=2), picked(body.pos[layer][None], pages, 0, page), -1)


def _within(page: int) -> Int[Array, "1 1 1 page"]:
    return jnp.arange(page, dtype=jnp.int32)[None, None, None]
