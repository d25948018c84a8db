"""Rows: gathers a cache's rows, or empties them for another sequence. No method, no model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Int

from kvjax.api.rollback import of_rows
from kvjax.base.errors import InputError
from kvjax.hosts.arrays import fetch
from kvjax.ops.base.memory import there
from kvjax.place.common import apart, with_common, without_common
from kvjax.place.host import forgotten
from kvjax.place.paged import take_pages
from kvjax.place.trim import counted
from kvjax.state.axes import placed
from kvjax.state.cache import Cache, GroupState, Paged, Pages, Segment, check_alive


def take_rows(cache: Cache, index: Array | np.ndarray | Sequence[int]) -> Cache:
    """Gather rows of a cache, for beam search, best of n or shared prefixes.

    Works inside `jit` too, where `index` is traced; an index outside [0, B) cannot be refused there and takes
    the nearest row.

    Args:
        cache: a live cache; it stays usable.
        index: indices of rows [R], in any order; a row may occur several times, or not at all.

    Returns:
        A cache of R rows, each with slots of its own.

    Raises:
        InputError: if `index` is not a list of row indices in [0, B), or a step consumed the cache, and for a
            traced index if the data decides how many slots stay (KVzap), since the host counts their pages.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> _, cache = kvjax.prefill(model, [[1, 2, 3], [4, 5]])
    >>> take_rows(cache, [1, 1, 0]).next.tolist()
    [2, 2, 3]
    """
    check_alive(cache)
    rows, at = cache.next.shape[0], index if isinstance(index, jax.Array) else np.asarray(index)
    if at.ndim != 1 or not at.shape[0] or not jnp.issubdtype(at.dtype, jnp.integer):
        raise InputError(
            f"index is {at.dtype}{list(at.shape)}, expected int32[R]: the numbers of at least one row"
        )
    if not isinstance(at, Tracer) and ((outside := np.asarray(at))[(outside < 0) | (outside >= rows)]).size:
        raise InputError(f"index is {outside.tolist()}, expected row numbers in [0, {rows})")
    cache = apart(cache)
    if isinstance(at, Tracer) and _cut(cache):
        raise InputError(
            "index is traced, expected numbers: how many pages rows of this method need follows from the "
            "data, so take them outside of jit"
        )
    pages = _pages_of_rows(cache, np.asarray(at)) if _cut(cache) else None
    taken = placed(gather_rows(cache, jnp.asarray(at, jnp.int32), pages), cache.on_mesh)
    return dataclasses.replace(taken, added=of_rows(cache.added, at))


def _cut(cache: Cache) -> bool:
    """Whether pools have only the pages in use, which rows do not own in equal parts."""
    return bool(cache.pools) and cache.method is not None and counted(cache.method)


def _pages_of_rows(cache: Cache, index: np.ndarray) -> tuple[int, ...]:
    """Per pool, the pages that rows `index` need, rounded up to an eighth to share programs."""
    found, rows = [], cache.next.shape[0]
    for number, pool in enumerate(cache.pools):
        heads = next(s for s in _paged(cache) if s.pool == number).lengths.shape[2]
        owner = fetch(pool.owner)
        row = owner[owner >= 0] // heads % rows
        need = max(int(np.bincount(row, minlength=rows)[index].sum()), 1)
        unit = max(2 ** (need.bit_length() - 4), 1)
        found.append(-(-need // unit) * unit)
    return tuple(found)


def gather_rows(cache: Cache, index: Int[Array, "R"], pages: tuple[int, ...] | None = None) -> Cache:
    """`take_rows` without checks. Shared slots are not moved: index must permute rows within their copies.

    pages: the pages of every new pool (static), as in `take_pages`.
    """
    return with_common(_gathered(without_common(cache), index, pages), cache)


@partial(jax.jit, static_argnames="pages")
def _gathered(cache: Cache, index: Int[Array, "R"], pages: tuple[int, ...] | None = None) -> Cache:
    index = jnp.clip(index, 0, cache.next.shape[0] - 1)
    tables, pools = {}, []
    for number, pool in enumerate(cache.pools):
        mine = tuple(s for s in _paged(cache) if s.pool == number)
        most = None if pages is None else pages[number]
        taken, pool = take_pages(mine, pool, index, most) if mine else (mine, pool)
        tables |= {(number, s.first_layer): s for s in taken}
        pools.append(pool)

    def take(x: Paged | Array) -> Paged | Array:
        return tables[x.pool, x.first_layer] if isinstance(x, Paged) else there(lambda y: y[:, index], x)

    groups = jax.tree.map(take, cache.groups, is_leaf=lambda x: isinstance(x, Paged))
    return dataclasses.replace(cache, groups=groups, next=cache.next[index], pools=tuple(pools))


def _paged(cache: Cache) -> list[Paged]:
    return [segment for group in cache.groups for segment in group.bodies if isinstance(segment, Paged)]


def reset_rows(cache: Cache, rows: Array | np.ndarray | Sequence[bool]) -> Cache:
    """Empty rows of a cache, as if they had never read a token.

    Args:
        cache: a live cache; it stays usable.
        rows: booleans [B], true for rows to empty.

    Returns:
        The cache. Capacities stay, an emptied row's next token has position 0, other rows are untouched.

    Raises:
        InputError: if `rows` is not one boolean per row, or a step consumed the cache.

    >>> import kvjax, jax.numpy as jnp
    >>> model = kvjax.load("recall-tiny")
    >>> _, cache = kvjax.prefill(model, [[1, 2, 3], [4, 5]])
    >>> reset_rows(cache, jnp.array([True, False])).next.tolist()
    [0, 2]
    """
    check_alive(cache)
    which = jnp.asarray(rows)
    if which.shape != cache.next.shape or which.dtype != jnp.bool_:
        raise InputError(
            f"rows is {which.dtype}{list(which.shape)}, expected one boolean per row, "
            f"bool[{cache.next.shape[0]}]: true where a row is to be emptied"
        )
    return placed(_reset(apart(cache), which), cache.on_mesh)


@jax.jit
def _reset(cache: Cache, rows: Bool[Array, "B"]) -> Cache:
    groups = tuple(_emptied_group(group, rows) for group in cache.groups)
    heads = {s.pool: s.lengths.shape[2] for s in _paged(cache)}
    pools = tuple(_emptied_pages(pool, rows, heads[i]) for i, pool in enumerate(cache.pools))
    return dataclasses.replace(cache, groups=groups, next=jnp.where(rows, 0, cache.next), pools=pools)


def _cleared(rows: Bool[Array, "B"], x: Array, value: int = 0) -> Array:
    return jnp.where(rows.reshape(1, -1, *(1,) * (x.ndim - 2)), jnp.asarray(value, x.dtype), x)


def nothing_carried(x: Array) -> int:
    """Return the initial value of what rows carry in an array: -1 for integers (positions), else 0."""
    return -1 if jnp.issubdtype(x.dtype, jnp.integer) else 0


def _emptied_group(group: GroupState, rows: Bool[Array, "B"]) -> GroupState:
    state = jax.tree.map(partial(_cleared, rows), group.state)
    memory = jax.tree.map(lambda x: _cleared(rows, x, nothing_carried(x)), group.rows)
    emptied = group.with_parts([_emptied(s, rows) for s in group.parts])
    return dataclasses.replace(emptied, state=state, rows=memory)


def _emptied(segment: Segment, rows: Bool[Array, "B"]) -> Segment:
    clear = partial(_cleared, rows)
    if isinstance(segment, Paged):
        return dataclasses.replace(segment, lengths=clear(segment.lengths))
    # Keys may stay, since empty slots are masked. Values are multiplied by zero, so those of a row that
    # overflowed must be removed; so must summaries, by which pages are ranked, and sums, to which new tokens
    # are added.
    return dataclasses.replace(
        segment,
        k=jax.tree.map(partial(there, clear), segment.k) if segment.v is None else segment.k,
        v=jax.tree.map(partial(there, clear), segment.v),
        pos=clear(segment.pos, -1),
        bias=None if segment.bias is None else clear(segment.bias),
        traces={n: clear(x) for n, x in segment.traces.items()},
        summary={n: clear(x) for n, x in segment.summary.items()},
        sums={n: clear(x) for n, x in segment.sums.items()},
        near=None if segment.near is None else forgotten(segment.near),
    )


def _emptied_pages(pool: Pages, rows: Bool[Array, "B"], heads: int) -> Pages:
    # A free page's owner is -1, which would index the last row.
    mine = rows[pool.owner // heads % rows.shape[0]] & (pool.owner >= 0)
    bias = None if pool.bias is None else jnp.where(mine[:, None], 0.0, pool.bias)

    def clear(x: Array) -> Array:
        return jnp.where(mine.reshape(-1, *(1,) * (x.ndim - 1)), jnp.zeros((), x.dtype), x)

    pos = jnp.where(mine[:, None], -1, pool.pos)
    k = jax.tree.map(partial(there, clear), pool.k) if pool.v is None else pool.k
    beside = {"v": pool.v, "traces": pool.traces, "summary": pool.summary}
    beside = jax.tree.map(partial(there, clear), beside)
    return dataclasses.replace(pool, k=k, pos=pos, bias=bias, **beside)
