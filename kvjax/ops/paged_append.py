"""Writing one new token per (sequence, KV head) into a pool of pages, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Num

from kvjax.ops.page_pool import BITS, PER_CHANNEL, PagePool


def paged_append(
    pool: PagePool,
    table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    k: Num[Array, "B K H"],
    v: Num[Array, "B K H"],
    layer: int | Int[Array, ""] = 0,
    *,
    numbers: Mapping[str, Float[Array, "B K"]] | None = None,
    active: Bool[Array, "B K"] | Bool[Array, " B"] | None = None,
) -> PagePool:
    """The pool with one token more in every active list, at slot `lengths`; the caller counts it.

    The words that hold the token are read, changed and written back by one scatter with a flat index, which
    XLA keeps in place where the pool is donated, inside a scan over layers too. A list that is not active, or
    whose table has no room, gets nothing, whatever its table names. No two active lists may write into the
    same page: copy a shared one first.

    numbers: what goes with the token, by name ("pos", "key_scale", ...). In a pool of codes k and v are
    codes. Raises ValueError where the numbers are not the pool's, where a pool has scales of channels (its
    pages are encoded whole), and where k is not of the pool's type.

    >>> from kvjax.ops.page_pool import make_pool
    >>> pages, table = jnp.zeros((1, 2, 4, 1)), jnp.asarray([[[1, 0]]])
    >>> one = jnp.ones((1, 1, 1))
    >>> pool = paged_append(make_pool(pages, pages), table, jnp.asarray([[5]]), one, 2 * one)
    >>> pool.keys[0, 0, :, 0].tolist(), pool.values[0, 0, :, 0].tolist()
    ([0.0, 1.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0])
    """
    given = numbers or {}
    if set(given) != set(pool.names) or set(given) & set(PER_CHANNEL):
        raise ValueError(
            f"numbers given for {sorted(given) or 'none'}, expected one for each of the pool's: "
            f"{', '.join(pool.names) or 'none'}, none of them of channels"
        )
    if k.dtype.name != pool.payload or v.dtype != k.dtype:
        raise ValueError(f"k of {k.dtype}, v of {v.dtype} for pages of {pool.payload}: encode or cast them")
    layers, count, rows, width = pool.words.shape
    block, slot = places((count, pool.page), table, lengths, layer, active)
    lists, pieces = block.shape[0], 32 // BITS[pool.payload]
    line, piece = slot // pieces, slot % pieces
    if pool.payload == "uint2":
        # Two planes of 4-bit numbers: the second half of a page lies above the first.
        line, piece = slot % (pool.page // 2) // 8, slot % 8 * 2 + slot // (pool.page // 2)
    codes = [_code(x.reshape(lists, -1), pool.width) for x in (k, v)]
    both = jnp.concatenate(codes, 1)[:, None] if pool.packed else jnp.stack(codes, 1)
    shift = jnp.maximum(piece, 0).astype(jnp.uint32)[:, None, None] * jnp.uint32(32 // pieces)
    whole = np.uint32(2 ** (32 // pieces) - 1)
    new, mask = both << shift, jnp.broadcast_to(whole << shift, both.shape)
    at = [line] if pool.packed else [line, pool.rows + line]
    for name in pool.names:
        lane = (jnp.arange(width)[None] == slot[:, None] % width)[:, None]
        word = jax.lax.bitcast_convert_type(given[name].reshape(lists, 1, 1).astype(jnp.float32), jnp.uint32)
        new = jnp.concatenate([new, jnp.where(lane, word, jnp.uint32(0))], 1)
        mask = jnp.concatenate([mask, jnp.where(lane, np.uint32(2**32 - 1), jnp.uint32(0))], 1)
        at.append(pool.number_row(name) + slot // width)
    index = block[:, None] * rows + jnp.stack(at, 1)
    flat = pool.words.reshape(-1, width)
    old = jax.lax.bitcast_convert_type(flat[jnp.clip(index, 0, flat.shape[0] - 1)], jnp.uint32)
    words = jax.lax.bitcast_convert_type((old & ~mask) | (new & mask), jnp.int32)
    index = jnp.where(slot[:, None] >= 0, index, np.iinfo(np.int32).max).reshape(-1)
    done = flat.at[index].set(words.reshape(-1, width), mode="drop")
    return dataclasses.replace(pool, words=done.reshape(pool.words.shape))


def _code(x: Num[Array, "I H"], width: int) -> Array:
    """The bits of x in the low end of uint32 words [I, W]."""
    x = jnp.pad(x, ((0, 0), (0, width - x.shape[1])))
    if jnp.issubdtype(x.dtype, jnp.integer):
        return x.astype(jnp.int32).astype(jnp.uint32)
    same = {32: jnp.uint32, 16: jnp.uint16, 8: jnp.uint8}[BITS[x.dtype.name]]
    return jax.lax.bitcast_convert_type(x, same).astype(jnp.uint32)


def places(
    sizes: tuple[int, int], table: Array, lengths: Array, layer: int | Array, active: Array | None
) -> tuple[Int[Array, " I"], Int[Array, " I"]]:
    """(page of all layers', slot in it) of the next token of every list; slot -1 where nothing is written.

    sizes: pages of a layer and tokens of a page; table [.., M]; lengths [..]; active a prefix of lengths'
    shape.
    """
    (count, page), most = sizes, table.shape[-1]
    at = jnp.clip(lengths // page, 0, most - 1)
    found = jnp.take_along_axis(table, at[..., None], -1)[..., 0]
    writes = (lengths >= 0) & (lengths < most * page)
    if active is not None:
        writes = writes & active.reshape(active.shape + (1,) * (lengths.ndim - active.ndim))
    block = jnp.asarray(layer, jnp.int32) * count + jnp.where(writes, found, 0)
    slot = jnp.where(writes, lengths % page, -1)
    return block.reshape(-1).astype(jnp.int32), slot.reshape(-1).astype(jnp.int32)
