"""The slots of a compressed one-row cache, by layer and KV head, on the host."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, Shaped

from kvjax.hosts.arrays import fetch
from kvjax.state.cache import Cache, Pages, Segment, Slots
from kvjax.state.codes import dense


class Lists(NamedTuple):
    """The slots of a group of layers; a position of -1 is an empty slot."""

    k: Shaped[np.ndarray, "Lg K S H"]
    v: Shaped[np.ndarray, "Lg K S H"]
    pos: Int[np.ndarray, "Lg K S"] | Float[np.ndarray, "Lg K S"]


def lists_of(cache: Cache) -> list[Lists]:
    """The slots of every group of layers of a one-row cache, by KV head, decoded."""
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
    """Moves the live slots of every KV head to the front, in arrays of `size` slots; positions as float32."""
    order = np.argsort(lists.pos < 0, axis=2, kind="stable")[:, :, :size]
    short = size - order.shape[2]
    pos = np.take_along_axis(lists.pos, order, 2).astype(np.float32)
    k, v = (np.take_along_axis(x, order[..., None], 2) for x in (lists.k, lists.v))
    k, v = (np.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))) for x in (k, v))
    return Lists(k, v, np.pad(pos, ((0, 0), (0, 0), (0, short)), constant_values=-1.0))
