"""Copies of rows: `fork`, with separate slots or with shared slots of the past."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.api.chunks import bucket, with_room
from kvjax.api.rollback import of_rows
from kvjax.api.rows import gather_rows, take_rows
from kvjax.base.checks import whole_number
from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import whole_tiles
from kvjax.hosts.arrays import fetch
from kvjax.ops.base.dispatch import alone
from kvjax.state.cache import Cache, GroupState, Slots, check_alive
from kvjax.state.codes import width_of


def fork(cache: Cache, copies: int, *, room: int | None = None) -> Cache:
    """Copy every row of a cache: row b becomes rows b * copies .. (b + 1) * copies - 1.

    With `room`, copies share the past of their row: `kvjax.nbytes` counts it once, and a step reads it once.
    `kvjax.step`, `generate` and `verify` keep it shared, and so do a `prefill` that compresses nothing and a
    `rollback` of what was added since; other functions first give every row its own slots. Slots that steps
    evict or encode, what they carry (windows, groups of codes, states) and contexts are copied in any case,
    and so is a cache on several devices or one whose method has not run yet: one that was loaded or made by
    `kvjax.pure`.

    Args:
        cache: a live cache; it stays usable.
        copies: of every row; each continues on its own.
        room: how many further tokens each copy has slots for; None copies the past, too.

    Returns:
        A cache of B * copies rows.

    Raises:
        InputError: if copies < 1 or room < 0, or a step consumed the cache.

    >>> import kvjax
    >>> model = kvjax.load("recall-tiny")
    >>> _, cache = kvjax.prefill(model, [[1, 2, 3], [4, 5]])
    >>> fork(cache, 2).next.tolist()
    [3, 3, 2, 2]
    >>> kvjax.nbytes(fork(cache, 8, room=4)) < kvjax.nbytes(cache)
    True
    """
    copies = whole_number("copies", copies, 1, "rows that each row becomes")
    room = None if room is None else whole_number("room", room, 0, "tokens that each copy may add")
    check_alive(cache)
    index = np.repeat(np.arange(cache.next.shape[0]), copies)
    if room is None or cache.added is None:
        return take_rows(cache, index)
    gms = cache.added.groups
    slots = _in_common(gms, cache) if copies > 1 and alone(cache.next) else (None,) * len(gms)
    bare = dataclasses.replace(_roomy(gms, cache, slots, room), method=None, model="")
    new = _forked(bare, copies, slots, room)
    return dataclasses.replace(new, method=cache.method, model=cache.model, added=of_rows(cache.added, index))


# Per group, how many slots of the tail the copies share; None if they are copied.
Common = tuple[int | None, ...]


def _in_common(gms: tuple[GroupMethod, ...], cache: Cache) -> Common:
    """Return the tails up to their last live slot, in whole buckets: no copy can use empty slots after it."""
    tails = [
        group.tail if gm.lasting and isinstance(group.tail, Slots) else None
        for gm, group in zip(gms, cache.groups, strict=True)
    ]
    used = iter(fetch(_used([tail.pos for tail in tails if tail is not None])))
    return tuple(None if tail is None else _whole(tail, int(next(used))) for tail in tails)


def _whole(tail: Slots, used: int) -> int:
    """Round the `used` slots of a tail up to sizes that caches of similar texts share; 0 if none is used."""
    return min(whole_tiles(bucket(used), width_of(tail.k)), tail.capacity) if used else 0


@jax.jit
def _used(tails: list[Int[Array, "_ _ _ _"]]) -> list[Int[Array, ""]]:
    """Return the index after the last live slot of any KV head."""
    return [
        jnp.where(pos >= 0, jnp.arange(1, pos.shape[3] + 1, dtype=jnp.int32), 0).max(initial=0)
        for pos in tails
    ]


def _roomy(gms: tuple[GroupMethod, ...], cache: Cache, slots: Common, room: int) -> Cache:
    """Add `room` free slots to the groups of the cache whose slots are copied."""
    copied = [i for i, n in enumerate(slots) if n is None]
    if not copied:
        return cache
    some = dataclasses.replace(cache, groups=tuple(cache.groups[i] for i in copied))
    some = with_room(tuple(gms[i] for i in copied), some, room)
    new = dict(zip(copied, some.groups, strict=True))
    groups = tuple(new.get(i, group) for i, group in enumerate(cache.groups))
    return dataclasses.replace(cache, groups=groups)


@partial(jax.jit, static_argnames=("copies", "slots", "room"))
def _forked(cache: Cache, copies: int, slots: Common, room: int) -> Cache:
    index = jnp.repeat(jnp.arange(cache.next.shape[0], dtype=jnp.int32), copies)
    pairs = list(zip(cache.groups, slots, strict=True))
    own = tuple(
        group if n is None else dataclasses.replace(group, bodies=(), tail=None) for group, n in pairs
    )
    copied = gather_rows(dataclasses.replace(cache, groups=own), index)
    groups = tuple(
        new if n is None else _sharing(old, new, n, len(index), room)
        for (old, n), new in zip(pairs, copied.groups, strict=True)
    )
    return dataclasses.replace(copied, groups=groups)


def _sharing(old: GroupState, new: GroupState, slots: int, rows: int, room: int) -> GroupState:
    """Make a group whose rows share the old slots, each with an empty tail of its own."""
    assert old.tail is not None
    past = (jax.tree.map(lambda x: x[:, :, :, :slots], old.tail),) if slots else ()
    # At least one empty slot: attention needs a slot.
    tail = _blank(old.tail, rows, whole_tiles(max(room, 1), width_of(old.tail.k)))
    return dataclasses.replace(new, bodies=(*old.bodies, *past), tail=tail)


def _blank(like: Slots, rows: int, slots: int) -> Slots:
    """Empty slots of the same kind."""

    def empty(x: Array) -> Array:
        return jnp.zeros((x.shape[0], rows, x.shape[2], slots, *x.shape[4:]), x.dtype)

    none = jax.tree.map(empty, like)
    return dataclasses.replace(none, pos=none.pos - 1)
