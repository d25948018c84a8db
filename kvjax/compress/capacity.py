"""Room: how many more tokens fit into a cache, and more empty slots if they do not fit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import reduce

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import body_slots, whole_tiles
from kvjax.grammar import Keep
from kvjax.grammar.calls import counts_slots
from kvjax.grammar.when import WhenFull
from kvjax.hosts.arrays import fetch
from kvjax.ops.base.memory import there
from kvjax.place.host import in_its_memory
from kvjax.place.trim import trimmed
from kvjax.state.cache import Cache, GroupState, Slots, State
from kvjax.state.codes import Codes, width_of
from kvjax.state.write import pad_slots

# The number of tokens that fit into a group that evicts by itself.
PLENTY = 2**30


def free_by_group(gms: tuple[GroupMethod, ...], cache: Cache) -> Int[Array, "groups B"]:
    """How many more tokens fit, per group and row; a large number for groups that evict old slots."""
    free = []
    for gm, group in zip(gms, cache.groups, strict=True):
        if gm.grows:
            assert group.state is not None
            count = group.state.data["count"]
            assert not isinstance(count, Codes)
            used = jnp.moveaxis(count, 1, 0)
            free.append(_room_of_state(gm, group) - used.reshape(used.shape[0], -1).max(1))
            continue
        if gm.kind != "slots":
            free.append(jnp.full(cache.next.shape, PLENTY, jnp.int32))
            continue
        if gm.rated:
            # A token is written into an empty slot before another one is evicted. Heads that have slots left
            # before their next eviction take more tokens than that, until the budget, a share of the tokens,
            # exceeds their slots.
            assert gm.keep is not None and group.tail is not None
            empty = (group.tail.pos < 0).sum(-1, dtype=jnp.int32).min((0, 2))
            due = tokens_in(gm.keep, list_capacity(gm, group)) - cache.next
            free.append(jnp.where(empty > 0, due if gm.split else jnp.maximum(due, empty), 0))
            continue
        # New tokens are written to the tail; a body takes them only if full tails are encoded into it.
        parts = (*group.bodies, group.tail) if gm.split else (group.tail,)
        used = [(s.pos < 0).sum(-1, dtype=jnp.int32) for s in parts if isinstance(s, Slots)]
        if gm.split:
            # Holes left by evicted slots are collected, one granule at a time.
            used[0] = used[0] // gm.granule * gm.granule
        room = reduce(jnp.add, used) + jnp.maximum(gm.sinks - cache.next, 0)[None, :, None]
        # A full body cannot take the granule that a full tail would flush.
        free.append((room - int(gm.split)).min((0, 2)))
    return jnp.stack(free)


def list_capacity(gm: GroupMethod, group: GroupState) -> int:
    """Return the largest number of slots of one KV head: a granule of a body may consist of holes."""
    assert group.tail is not None
    if not gm.split:
        return group.tail.capacity
    return sum(s.capacity for s in group.parts if isinstance(s, Slots)) - gm.granule


def tokens_in(keep: Keep, capacity: int) -> int:
    """How many tokens a row may have seen before a keep that evicts in steps exceeds `capacity` slots."""
    return keep.budget.reach(capacity - (1 if isinstance(keep.when, WhenFull) else keep.when.due_at(0)))


def reserve(gms: tuple[GroupMethod, ...], cache: Cache, room: int) -> Cache:
    """Reserve `room` more empty slots per KV head in every group of the cache that does not evict."""

    def grow(gm: GroupMethod, group: GroupState) -> GroupState:
        if gm.grows:
            return widened(gm, group, more_slots(gm, room, 0))
        if gm.rated or gm.kind != "slots":
            return group
        tail = group.tail
        assert tail is not None
        return widened(gm, group, more_slots(gm, room, width_of(tail.k)))

    groups = tuple(grow(g, x) for g, x in zip(gms, cache.groups, strict=True))
    return dataclasses.replace(cache, groups=groups)


def as_used(
    gms: tuple[GroupMethod, ...], cache: Cache, bucket: Callable[[int], int], room: int
) -> Cache:  # fmt: skip
    """Cut the cache down to the slots in use, if only the data says how many these are.

    Pools are cut as in `trimmed`; dense slots whose number a score threshold decides, to bucket(the most
    slots of any KV head) and `room` more. bucket: as of `trimmed`.
    """

    def shorter(gm: GroupMethod, group: GroupState) -> GroupState:
        if not counts_slots(gm.keep):
            return group
        tail = group.tail
        assert tail is not None
        # Kept slots are the first ones of every KV head: in granules, then in the tail.
        parts = [part for part in (*group.bodies, tail) if isinstance(part, Slots)]
        held = [(fetch(part.pos) >= 0).sum(-1) for part in parts]
        longest = bucket(int(reduce(np.add, held).max(initial=1)))
        size = whole_tiles(longest + room, width_of(tail.k), gm.multiple)
        if not gm.split:
            return group.with_tail(_first_slots(tail, size))
        (body,) = group.bodies
        assert isinstance(body, Slots)
        return dataclasses.replace(group, bodies=(_first_slots(body, body_slots(gm, size)),))

    cache = trimmed(cache, bucket)
    groups = tuple(shorter(gm, group) for gm, group in zip(gms, cache.groups, strict=True))
    return dataclasses.replace(cache, groups=groups)


def _first_slots(slots: Slots, count: int) -> Slots:
    """Take the first `count` slots of every KV head; of codes, as many granules."""

    def cut(x: Array) -> Array:
        return x[:, :, :, : x.shape[3] * count // slots.capacity]

    return jax.tree.map(lambda x: there(cut, x), slots)


def more_slots(gm: GroupMethod, room: int, width: int) -> int:
    """How many empty slots a group with rows of `width` channels gets for `room` more tokens."""
    return -(-room // gm.granule) * gm.granule if gm.split else whole_tiles(room, width, gm.multiple)


def widened(gm: GroupMethod, group: GroupState, slots: int) -> GroupState:
    """Return the group with `more_slots` more empty slots."""
    if gm.grows:
        return longer(gm, group, slots)
    if not gm.split:
        assert group.tail is not None
        return group.with_tail(pad_slots(group.tail, slots))
    *pages, body = group.bodies
    assert isinstance(body, Slots)
    body = _pad_granules(body, slots // gm.granule, gm.granule)
    body = in_its_memory(gm.host, gm.read, body)
    return dataclasses.replace(group, bodies=(*pages, body))


def _room_of_state(gm: GroupMethod, group: GroupState) -> int:
    """How many tokens fit into those parts of a state that grow."""
    assert group.state is not None
    part = group.state.data[min(gm.grows)]
    assert not isinstance(part, Codes)
    return part.shape[2]


def longer(gm: GroupMethod, group: GroupState, tokens: int) -> GroupState:
    """Make space for `tokens` more tokens in those parts of the group's state that grow."""
    if not gm.grows or not tokens:
        return group
    assert group.state is not None

    def grow(x: Array) -> Array:
        return jnp.pad(x, [(0, tokens if axis == 2 else 0) for axis in range(x.ndim)])

    data = {n: grow(x) if n in gm.grows else x for n, x in group.state.data.items()}  # type: ignore[arg-type]
    return dataclasses.replace(group, state=State(data))


def _pad_granules(body: Slots, granules: int, granule: int) -> Slots:
    def grow(x: Array, fill: int = 0) -> Array:
        more = x.shape[3] * granule // body.capacity * granules
        return jnp.pad(x, [(0, 0)] * 3 + [(0, more)] + [(0, 0)] * (x.ndim - 4), constant_values=fill)

    padded = jax.tree.map(lambda x: there(grow, x), dataclasses.replace(body, sums={}, near=None))
    return dataclasses.replace(padded, pos=grow(body.pos, -1), sums=body.sums)
