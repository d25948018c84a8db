"""Random caches with the shapes, bytes and positions that a prefill would leave.

The time of a decode step depends on how many slots there are and where, not on their contents. Reading a
prompt of 131072 tokens in each of eight rows would take longer than the whole benchmark.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax import steps
from kvjax.compress.group import GroupMethod
from kvjax.ops.base.bit_packing import pair, short
from kvjax.state.cache import Cache, Paged, Pages, Slots


def shapes(run: steps.Run, params: Any, batch: int, tokens: int, room: int) -> Cache:
    """Return the shapes that a prefill of `tokens` tokens leaves; compute nothing."""
    prefill = partial(steps.prefill, run, tokens_bound=tokens, room=room, compress=True)
    ids = jax.ShapeDtypeStruct((batch, tokens), jnp.int32)
    lengths = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return jax.eval_shape(lambda p, t, n: prefill(p, t, n, None)[1], params, ids, lengths)


@partial(jax.jit, static_argnames=("shape", "dtype"))
def _noise(key: Any, shape: tuple[int, ...], dtype: Any, spread: float) -> Any:
    if jnp.issubdtype(dtype, jnp.integer):
        return jax.random.bits(key, shape, jnp.dtype(f"uint{8 * dtype.itemsize}")).astype(dtype)
    return (jax.random.normal(key, shape, jnp.bfloat16) * spread).astype(dtype)


def noise(key: Any, like: jax.ShapeDtypeStruct, spread: float = 1.0) -> jax.Array:
    """Random numbers of a shape, layer by layer, so that drawing them takes little memory."""
    if like.ndim < 3 or like.shape[0] == 1:
        return _noise(key, like.shape, like.dtype, jnp.bfloat16(spread))

    def layer(key: Any) -> jax.Array:
        return _noise(key, like.shape[1:], like.dtype, jnp.bfloat16(spread))

    return jax.lax.map(layer, jax.random.split(key, like.shape[0]))


def weights(like: Any, seed: int = 0) -> Any:
    """Random parameters of these shapes, small enough that activations stay finite; norms are ones."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(key: Any, path: Any, x: jax.ShapeDtypeStruct) -> jax.Array:
        norm = jax.tree_util.keystr(path).endswith("norm']")
        return jnp.ones(x.shape, x.dtype) if norm else noise(key, x, 0.02)

    return tree.unflatten([draw(k, path, x) for k, (path, x) in zip(keys, leaves, strict=True)])


def _positions(shape: tuple[int, ...], live: int, tokens: int) -> jax.Array:
    """`live` positions below `tokens` in every KV head, evenly spaced, followed by empty slots."""
    row = np.full(shape[-1], -1, np.int32)
    row[:live] = np.arange(live, dtype=np.int64) * tokens // max(live, 1)
    return jnp.broadcast_to(jnp.asarray(row), shape)


def made_up(like: Cache, gms: tuple[GroupMethod, ...], tokens: int, room: int, seed: int = 0) -> Cache:
    """Make up a cache of these shapes after `tokens` tokens, with `room` free slots. gms: of its groups.

    KV heads in pools alternate between half and one and a half times the mean number of slots, as uneven as
    under Ada-KV.
    """
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    # Random bits may be NaN, so all scales and zeros of codes get the same number.
    one = pair(short(jnp.float32(0.01)), short(jnp.float32(-1)))
    cache = tree.unflatten(
        [
            jnp.full(x.shape, one) if jax.tree_util.keystr(path).endswith("['scale_zero']") else noise(k, x)
            for k, (path, x) in zip(keys, leaves, strict=True)
        ]
    )
    pools = list(cache.pools)
    groups = []
    for gm, group in zip(gms, cache.groups, strict=True):
        bodies = []
        tail = group.tail.capacity - room
        if gm.split:
            tail = gm.residual + (tokens - gm.residual) % gm.granule
        for segment in group.bodies:
            if isinstance(segment, Slots):
                segment = _filled(segment, min(segment.capacity, tokens - tail), tokens)
            else:
                segment, pools[segment.pool] = _dealt(segment, pools[segment.pool], tokens)
            bodies.append(segment)
        # The tail, which new tokens enter, holds the newest tokens; the bodies before it hold all others.
        filled = _filled(group.tail, tail, tokens)
        groups.append(dataclasses.replace(group, bodies=tuple(bodies), tail=filled))
    return dataclasses.replace(
        cache, groups=tuple(groups), next=jnp.full(like.next.shape, tokens, jnp.int32), pools=tuple(pools)
    )


def _filled(slots: Slots, live: int, tokens: int) -> Slots:
    """Fill the slots of a segment, with `live` of `tokens` tokens in each KV head."""
    pos = _positions(slots.pos.shape, live, tokens)
    return dataclasses.replace(slots, pos=pos, traces=jax.tree.map(jnp.abs, slots.traces))


def _dealt(segment: Paged, pool: Pages, tokens: int) -> tuple[Paged, Pages]:
    """Deal the pages of a pool of one group to its KV heads in the order of owners."""
    pages, page = pool.pos.shape
    lists = int(np.prod(segment.lengths.shape))
    # A pool has one more page per KV head than its slots fill, since each head's last page is partly empty.
    filled = -(-(pages * page - lists * (page - 1)) // page)
    share = np.cumsum(np.where(np.arange(lists) % 2, 3, 1))
    counts = np.diff(share * filled // share[-1], prepend=0)
    counts = np.minimum(counts, segment.most)
    ends = np.cumsum(counts)
    owner = np.full(pages, -1, np.int32)
    owner[: ends[-1]] = np.repeat(np.arange(lists), counts)
    first = np.minimum(ends - counts, pages - 1)
    pos = np.arange(pages * page, dtype=np.int64).reshape(pages, page) % tokens
    pos = np.where(owner[:, None] >= 0, pos, -1)
    shape = segment.lengths.shape
    return (
        dataclasses.replace(
            segment,
            first=jnp.asarray(first.reshape(shape), jnp.int32),
            lengths=jnp.asarray((counts * page).reshape(shape), jnp.int32),
        ),
        dataclasses.replace(pool, pos=jnp.asarray(pos, jnp.int32), owner=jnp.asarray(owner)),
    )
