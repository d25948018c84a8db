"""The slots of a compressed one-row cache, by layer and KV head, on the host."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kvjax.hosts.arrays import fetch
from kvjax.serve.device.code_pages import POS, ROWS, PageLayout, as_words, encoded
from kvjax.serve.device.code_step import CodePool
from kvjax.state.cache import Cache, Pages, Segment, Slots
from kvjax.state.codes import Codes, dense


class Lists(NamedTuple):
    """The slots of a group of layers; a position of -1 is an empty slot."""

    k: Shaped[np.ndarray, "Lg K S H"]
    v: Shaped[np.ndarray, "Lg K S H"]
    pos: Int[np.ndarray, "Lg K S"] | Float[np.ndarray, "Lg K S"]


def lists_of(cache: Cache) -> list[Lists]:
    """List the slots of every group of layers of a one-row cache, by KV head, decoded."""
    found = []
    for group in cache.groups:
        assert group.state is None and group.sinks is None
        parts = [_part(part, cache.pools) for part in group.parts]
        found.append(Lists(*(np.concatenate(x, 2) for x in zip(*parts, strict=True))))
    return found


def _part(part: Segment, pools: tuple[Pages, ...]) -> Lists:
    if isinstance(part, Slots):
        assert part.v is not None and part.bias is None
        return Lists(*(x[:, 0] for x in fetch((dense(part.k), dense(part.v), part.pos))))
    pool = pools[part.pool]
    assert pool.v is not None and pool.bias is None
    k, v = dense(pool.k), dense(pool.v)
    k, v, pos, table, lengths = fetch((k, v, pool.pos, pool.table(part), part.lengths))
    k, v, pos = (x[table[:, 0]] for x in (k, v, pos))
    k, v, pos = (x.reshape(*x.shape[:2], -1, *x.shape[4:]) for x in (k, v, pos))
    return Lists(k, v, np.where(np.arange(pos.shape[2]) < lengths[:, 0, :, None], pos, -1))


def in_front(lists: Lists, size: int) -> Lists:
    """Move the live slots of every KV head to the front, in arrays of `size` slots; positions as float32."""
    order = np.argsort(lists.pos < 0, axis=2, kind="stable")[:, :, :size]
    short = size - order.shape[2]
    pos = np.take_along_axis(lists.pos, order, 2).astype(np.float32)
    k, v = (np.take_along_axis(x, order[..., None], 2) for x in (lists.k, lists.v))
    k, v = (np.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))) for x in (k, v))
    return Lists(k, v, np.pad(pos, ((0, 0), (0, 0), (0, short)), constant_values=-1.0))


class CodeLists(NamedTuple):
    """The coded granules of a group of layers as words [Lg, K, G, n], live ones first, and how many are live.

    tail: the ring of uncoded tokens in the same form; empty without one. stored: tokens in all.
    """

    words: tuple[np.ndarray, ...]
    count: Int[np.ndarray, "Lg K"]
    tail: tuple[np.ndarray, ...]
    stored: Int[np.ndarray, "Lg K"]


def code_lists_of(cache: Cache, pools: tuple[CodePool, ...], granules: int) -> list[CodeLists]:
    """List the codes of every group of layers of a one-row cache as stored, in `granules` granules."""
    assert all(group.state is None and group.sinks is None for group in cache.groups)
    # The newest tokens are in the last segment where they are not coded.
    coded = [
        group.parts if pool.plain is None else group.parts[:-1]
        for group, pool in zip(cache.groups, pools, strict=True)
    ]
    layouts = tuple(pool.coded for pool in pools)
    found, held = [], fetch(granule_words(tuple(map(tuple, coded)), cache.pools, layouts))
    for group, pool, each in zip(cache.groups, pools, held, strict=True):
        newest = None if pool.plain is None else group.parts[-1]
        words = tuple(np.concatenate(x, 2) for x in zip(*(one[0] for one in each), strict=True))
        pos = np.concatenate([one[1] for one in each], 2)
        order = np.argsort(np.where(pos < 0, np.inf, pos), axis=2, kind="stable")[:, :, :granules]
        words = tuple(_filled(np.take_along_axis(x, order[..., None], 2), granules) for x in words)
        count = (pos >= 0).sum(2, dtype=np.int32)
        coded = count * pool.coded.granule
        tail = _ring(newest, coded, pool) if newest is not None else ((), 0)
        found.append(CodeLists(words, count, tail[0], coded + tail[1]))
    return found


def _filled(x: np.ndarray, granules: int) -> np.ndarray:
    return np.pad(x, ((0, 0), (0, 0), (0, granules - x.shape[2]), (0, 0)))


@partial(jax.jit, static_argnames=("layouts",))
def granule_words(
    groups: tuple[tuple[Segment, ...], ...], pools: tuple[Pages, ...], layouts: tuple[PageLayout, ...]
) -> tuple[tuple[tuple[tuple[Array, ...], Array], ...], ...]:
    """Write every segment's granules as words, with the position of the first token of each, by group."""
    each = zip(groups, layouts, strict=True)
    return tuple(tuple(_granules(part, pools, layout) for part in parts) for parts, layout in each)


def _granules(part: Segment, pools: tuple[Pages, ...], layout: PageLayout) -> tuple[tuple[Array, ...], Array]:
    """Write a segment's granules as words [Lg, K, G, n], with the position of the first token of each."""
    if isinstance(part, Slots):
        k, v, pos = part.k, part.v, part.pos[:, 0]
        whole = lambda x: x[:, 0]  # noqa: E731
    else:
        pool = pools[part.pool]
        table, lengths = pool.table(part)[:, 0], part.lengths[:, 0]
        k, v = pool.k, pool.v
        whole = lambda x: x[table].reshape(*table.shape[:2], -1, *x.shape[2:])  # noqa: E731
        pos = whole(pool.pos)
        pos = jnp.where(jnp.arange(pos.shape[2])[None, None] < lengths[..., None], pos, -1)
    assert k is not None and v is not None
    data = {side: x.data if isinstance(x, Codes) else {ROWS: x} for side, x in (("key", k), ("value", v))}
    data[POS] = {ROWS: pos.astype(jnp.int32)}
    given = [
        data[one.side][one.name] if one.side == POS else whole(data[one.side][one.name])
        for one in layout.pieces
    ]
    words = tuple(as_words(x, one) for x, one in zip(given, layout.pieces, strict=True))
    return words, pos[:, :, :: layout.granule]


ring_words = jax.jit(encoded, static_argnames=("layout",))


def _ring(
    tail: Segment, coded: Int[np.ndarray, "Lg K"], pool: CodePool
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Return the newest tokens, uncoded, in ring order, and how many; `coded` older ones are coded."""
    assert isinstance(tail, Slots) and tail.v is not None and pool.plain is not None
    k, v, pos = (np.asarray(x[:, 0]) for x in fetch((dense(tail.k), dense(tail.v), tail.pos)))
    ring, count = pool.holding.ring, (pos >= 0).sum(2, dtype=np.int32)
    assert (fetch(pool.coded_tokens(jnp.asarray(coded + count))) == coded).all()
    slot = np.argsort(np.where(pos < 0, np.iinfo(np.int32).max, pos), axis=2, kind="stable")[:, :, :ring]
    # Token i of a list is in place i of the ring, modulo its size; places that no token has hold anything.
    at = (np.arange(ring) - coded[..., None]) % ring
    order = np.take_along_axis(slot, np.minimum(at, slot.shape[2] - 1), 2)
    k, v = (np.take_along_axis(x, order[..., None], 2) for x in (k, v))
    words = ring_words(pool.plain, k, v, order.astype(np.int32))
    return tuple(map(np.asarray, fetch(words))), count
