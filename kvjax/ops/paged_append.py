"""Writing one new token per (sequence, KV head) into a pool of pages, in place."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Num

from kvjax.ops.append import append
from kvjax.ops.paged_decode import PagePool


def paged_append(
    pool: PagePool,
    table: Int[Array, "B K M"],
    lengths: Int[Array, "B K"],
    k: Num[Array, "B K H"],
    v: Num[Array, "B K H"],
    layer: int | Int[Array, ""] = 0,
    *,
    rows: Mapping[str, Float[Array, "B K"] | Int[Array, "B K"]] | None = None,
    active: Bool[Array, "B K"] | Bool[Array, " B"] | None = None,
    implementation: str | None = None,
) -> PagePool:
    """The pool with one token more in every active list, at slot `lengths`; the caller counts it.

    The pool stays in its own memory where it is donated, inside a scan over layers too. A list that is not
    active, or whose table has no room, gets nothing, whatever its table names. No two active lists may write
    into the same page: copy a shared one first.

    rows: what goes into the pool's side rows, by name ("pos", "key_scale", ...). In a pool of codes k and v
    are codes. implementation: see `kvjax.ops.append.append`. Raises ValueError where the rows are not the
    pool's, or floating numbers would go into a pool of integers.

    >>> pool, table = PagePool(jnp.zeros((1, 2, 2, 4, 1))), jnp.asarray([[[1, 0]]])
    >>> one = jnp.ones((1, 1, 1))
    >>> pool = paged_append(pool, table, jnp.asarray([[5]]), one, 2 * one)
    >>> pool.pages[0, 0, :, :, 0].tolist()
    [[0.0, 1.0, 0.0, 0.0], [0.0, 2.0, 0.0, 0.0]]
    """
    given = rows or {}
    if set(given) != set(pool.names):
        raise ValueError(
            f"rows given for {sorted(given) or 'none'}, expected one for each of the pool's: "
            f"{', '.join(pool.names) or 'none'}"
        )
    if jnp.issubdtype(pool.pages.dtype, jnp.integer) and jnp.issubdtype(k.dtype, jnp.floating):
        raise ValueError(f"k of {k.dtype} for pages of {pool.pages.dtype}: encode it and give the codes")
    block, slot = places(pool.pages, table, lengths, layer, active)
    _, _, _, page, width = pool.pages.shape
    lists, h = block.shape[0], k.shape[-1]
    both = jnp.stack([k.reshape(lists, h), v.reshape(lists, h)], 1)
    pools = [pool.pages.reshape(-1, 2, page, width)]
    new = [jnp.pad(both, ((0, 0), (0, 0), (0, width - h)))]
    if pool.rows is not None:
        pools.append(pool.rows.reshape(-1, len(pool.names), page))
        new.append(jnp.stack([given[n].reshape(lists).astype(pool.rows.dtype) for n in pool.names], 1))
    done = append(pools, new, block, slot, implementation=implementation)
    side = None if pool.rows is None else done[1].reshape(pool.rows.shape)
    return dataclasses.replace(pool, pages=done[0].reshape(pool.pages.shape), rows=side)


def places(
    pages: Array, table: Array, lengths: Array, layer: int | Array, active: Array | None
) -> tuple[Int[Array, " I"], Int[Array, " I"]]:
    """(page of all layers', slot in it) of the next token of every list; slot -1 where nothing is written.

    pages [L, P, .., page, W]; table [.., M]; lengths [..]; active a prefix of lengths' shape.
    """
    page, most = pages.shape[-2], table.shape[-1]
    at = jnp.clip(lengths // page, 0, most - 1)
    found = jnp.take_along_axis(table, at[..., None], -1)[..., 0]
    writes = (lengths >= 0) & (lengths < most * page)
    if active is not None:
        writes = writes & active.reshape(active.shape + (1,) * (lengths.ndim - active.ndim))
    block = jnp.asarray(layer, jnp.int32) * pages.shape[1] + jnp.where(writes, found, 0)
    slot = jnp.where(writes, lengths % page, -1)
    return block.reshape(-1).astype(jnp.int32), slot.reshape(-1).astype(jnp.int32)
