"""Shared prefixes: copies of a row read the same stored slots, and each adds tokens of its own.

A body then has fewer rows than the cache: row r reads row r // copies of it. `kvjax.fork` makes such bodies;
decode steps and prompts attend to them in place, and functions that cannot first separate the copies
(`apart`).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from kvjax.place.paged import take_pages
from kvjax.state.cache import Cache, GroupState, Paged, Pages, Segment, Slots


def copies_of(part: Segment, rows: int) -> int:
    """How many of the cache's rows share each row of the part; part: of all layers or of one."""
    return rows // part.rows


def has_common(group: GroupState, rows: int) -> bool:
    """Whether rows share slots of the group."""
    return any(copies_of(body, rows) > 1 for body in group.bodies)


def is_shared(cache: Cache) -> bool:
    """Whether rows share slots."""
    return any(has_common(group, cache.next.shape[0]) for group in cache.groups)


def apart(cache: Cache) -> Cache:
    """Copy the shared slots of the cache for each row; the given cache if there are none."""
    if not is_shared(cache):
        return cache
    return dataclasses.replace(_apart(cache), spare=cache.spare, added=cache.added)


@jax.jit
def own_tokens(cache: Cache) -> Int[Array, "B"]:
    """Per row, how many tokens it has added after those that it shares with others."""
    rows = cache.next.shape[0]
    tails = [g.tail for g in cache.groups if g.tail is not None and has_common(g, rows)]
    counts = [(tail.pos >= 0).sum(-1, dtype=jnp.int32).min((0, 2)) for tail in tails]
    return jnp.stack(counts).min(0)


@jax.jit
def _apart(cache: Cache) -> Cache:
    rows, groups, pools = cache.next.shape[0], list(cache.groups), []
    for number, pool in enumerate(cache.pools):
        mine = [i for i, group in enumerate(groups) if number in _pools_of(group)]
        taken, pool = _pages_apart([groups[i].bodies[0] for i in mine], pool, rows)
        pools.append(pool)
        for i, body in zip(mine, taken, strict=True):
            groups[i] = dataclasses.replace(groups[i], bodies=(body, *groups[i].bodies[1:]))
    done = tuple(_slots_apart(group, rows) for group in groups)
    return dataclasses.replace(cache, groups=done, pools=tuple(pools))


def _pools_of(group: GroupState) -> set[int]:
    return {body.pool for body in group.bodies if isinstance(body, Paged)}


def _pages_apart(tables: list, pool: Pages, rows: int) -> tuple[tuple[Paged, ...], Pages]:
    copies = copies_of(tables[0], rows)
    index: Int[Array, "R"] = jnp.arange(rows, dtype=jnp.int32) // copies
    return (tuple(tables), pool) if copies == 1 else take_pages(tuple(tables), pool, index)


def _slots_apart(group: GroupState, rows: int) -> GroupState:
    """Join a shared row's slots and those of each copy in one segment, as before they were shared."""
    pages = tuple(body for body in group.bodies if isinstance(body, Paged))
    common = [body for body in group.bodies if isinstance(body, Slots) and copies_of(body, rows) > 1]
    if not common:
        return group
    each = [jax.tree.map(lambda x: jnp.repeat(x, rows // x.shape[1], axis=1), s) for s in common]
    tail = jax.tree.map(lambda *x: jnp.concatenate(x, axis=3), *each, group.tail)
    return dataclasses.replace(group, bodies=pages, tail=tail)


def without_common(cache: Cache) -> Cache:
    """Drop the shared slots of the cache: the rest moves when rows change places among copies."""
    rows = cache.next.shape[0]
    gone = {i for group in cache.groups if has_common(group, rows) for i in _pools_of(group)}
    groups = tuple(dataclasses.replace(g, bodies=()) if has_common(g, rows) else g for g in cache.groups)
    pools = tuple(None if i in gone else pool for i, pool in enumerate(cache.pools))
    return dataclasses.replace(cache, groups=groups, pools=pools)


def with_common(own: Cache, cache: Cache) -> Cache:
    """`own`, which was made from `without_common(cache)`, with the shared slots of the cache added again."""
    rows = cache.next.shape[0]
    pairs = zip(own.groups, cache.groups, strict=True)
    groups = tuple(dataclasses.replace(a, bodies=b.bodies) if has_common(b, rows) else a for a, b in pairs)
    pools = tuple(b if a is None else a for a, b in zip(own.pools, cache.pools, strict=True))
    return dataclasses.replace(own, groups=groups, pools=pools)
