"""Holes: places of evicted slots in a body whose codes span several tokens, and how they are reused.

A granule keeps its bytes while one of its slots is live. When a KV head must flush a granule of its tail and
no granule of its body is empty, the sparsest granules are compacted: the fewest that fit into one less.
Only they are decoded, encoded and summarised anew, by the range of their live tokens; all others stay.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.selection import orders
from kvjax.compress.summaries import summary_of_new
from kvjax.keep.select import slot_lists
from kvjax.state.cache import Slots
from kvjax.state.codes import Codes, dense, encode, with_arrays


def in_order(slots: Slots) -> Slots:
    """Unencoded slots sorted by position, the empty ones last."""
    index = orders(slots.pos)[0]
    return jax.tree.map(lambda x: _taken(x, index), slots)


def empty_granules(
    pos: Int[Array, "l B K S"], granule: int, wanted: Int[Array, "l B K"], most: int
) -> Int[Array, "l B K most"]:
    """Find the first `wanted` granules of every KV head without a live slot, padded with -1."""
    empty = (pos < 0).reshape(*pos.shape[:3], -1, granule).all(-1)
    index, used = slot_lists(empty, most)
    return jnp.where(used & (_numbers(index.shape) < wanted[..., None]), index, -1)


def gathered(gm: GroupMethod, body: Slots, due: Bool[Array, "l B K"], layer: int | Array) -> Slots:
    """Empty a granule of the body in every head that is due, if its holes add up to one."""
    size = due.shape[0]
    part = jax.lax.dynamic_slice_in_dim(body.pos, layer, size)
    rows = part.shape[3] // gm.granule
    count = (part >= 0).reshape(*part.shape[:3], rows, gm.granule).sum(-1, dtype=jnp.int32)
    order = jnp.argsort(count, axis=-1, stable=True)
    held = jnp.cumsum(jnp.take_along_axis(count, order, -1), -1)
    fits = held <= _numbers(count.shape) * gm.granule
    # If an empty granule exists already, there is nothing to compact.
    due &= fits.any(-1) & (count > 0).all(-1)
    rank = jnp.argsort(order, axis=-1)
    mine = (rank <= jnp.argmax(fits, -1)[..., None]) & due[..., None]

    def gather(_: int | Array, body: Slots) -> Slots:
        return _gathered(gm, body, mine, layer)

    return jax.lax.fori_loop(0, due.any().astype(jnp.int32), gather, body)


def _gathered(gm: GroupMethod, body: Slots, mine: Bool[Array, "l B K R"], layer: int | Array) -> Slots:
    """Compact the live slots of some granules of the body into the first of these."""
    size, granule = mine.shape[0], gm.granule
    part: Slots = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, size), body)
    part = with_arrays(part, gm.codec_arrays)
    here = jnp.repeat(mine, granule, axis=3)
    live = here & (part.pos >= 0)
    source = jnp.argsort(jnp.where(live, part.pos, jnp.iinfo(jnp.int32).max), axis=-1, stable=True)
    total = live.sum(-1, keepdims=True, dtype=jnp.int32)
    place = jnp.repeat(jnp.cumsum(mine, -1, dtype=jnp.int32) - 1, granule, axis=3) * granule
    place += _numbers(place.shape) % granule
    used = here & (place < total)
    # Empty slots repeat a live token, so that they do not widen a quantiser's range.
    index = jnp.take_along_axis(source, jnp.clip(place, 0, jnp.maximum(total - 1, 0)), axis=-1)

    def put(old: Array, new: Array, block: Bool[Array, "l B K R"]) -> Array:
        """Take new rows where granules are compacted."""
        there = jnp.repeat(block, old.shape[3] // block.shape[3], axis=3)
        new = jnp.where(there.reshape(*there.shape, *(1,) * (old.ndim - 4)), new, _sliced(old))
        return jax.lax.dynamic_update_slice_in_dim(old, new, layer, 0)

    def _sliced(x: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(x, layer, size)

    def coded(own: Array | Codes, i: int) -> Array | Codes:
        return encode(_taken(dense(own), index), gm.codecs[i], gm.codec_arrays)

    def blocks(old: Any, new: Any) -> Any:
        return jax.tree.map(lambda x, new: put(x, new, mine), old, with_arrays(new, ()))

    def number(old: Array, own: Array, fill: int) -> Array:
        return put(old, jnp.where(used, _taken(own, index), jnp.asarray(fill, own.dtype)), mine)

    k, there = coded(part.k, 0), dataclasses.replace(part, pos=_taken(part.pos, index), summary={}, sums={})
    return dataclasses.replace(
        body,
        k=blocks(body.k, k),
        v=None if body.v is None or part.v is None else blocks(body.v, coded(part.v, 1)),
        summary=blocks(body.summary, summary_of_new(gm, body, k, there, layer)),
        pos=number(body.pos, part.pos, -1),
        bias=None if body.bias is None or part.bias is None else number(body.bias, part.bias, 0),
        traces={name: number(x, part.traces[name], 0) for name, x in body.traces.items()},
    )


def _numbers(shape: tuple[int, ...]) -> Array:
    """0, 1, 2, ... along the last axis."""
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)


def _taken(x: Array, index: Int[Array, "l B K C"]) -> Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 4)), axis=3)
