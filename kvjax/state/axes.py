"""The logical axes of every part of a cache, and caches sharded by a mesh's rules.

A part's axes follow from its place in the tree. The rules decide which axes are split
(`kvjax.mesh.rules`); this module says what each axis of an array is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array

from kvjax.base.errors import InputError
from kvjax.mesh.on_mesh import Axes, OnMesh
from kvjax.ops.base.memory import KIND, in_host
from kvjax.state.cache import Cache, GroupState, Near, Paged, Pages, Segment, Slots, State, nbytes

# (axes, array) -> the result for the array.
OfArray = Callable[[Axes, Array], Any]

_LISTS: Axes = ("layers", "batch", "kv_heads")
# The axes of recurrent states after layers and rows, by name; mixers register them.
_STATES: dict[str, Axes] = {}


def say_state_axes(name: str, axes: Axes) -> None:
    """Register the logical axes, after layers and rows, of the recurrent states called `name`.

    A cache knows its states by name alone, so a name has the same axes in all mixers.
    Raises InputError for a name that has others.
    """
    known = _STATES.setdefault(name, axes)
    if known != axes:
        raise InputError(
            f"the state {name!r} has the axes {axes} here and {known} in another mixer: choose another name"
        )


def axes_of_state(name: str) -> Axes | None:
    """Return the logical axes of a recurrent state after layers and rows; None if no mixer registered it."""
    return _STATES.get(name)


def map_axes(f: OfArray, cache: Cache, on: OnMesh | None = None) -> Cache:
    """Put f(axes, array) in place of every array of the cache.

    on: slots that its rules consider too few to split do not count as an axis.
    """
    groups = tuple(_group(f, group, on) for group in cache.groups)
    pools = tuple(_pool(f, pool) for pool in cache.pools)
    return dataclasses.replace(cache, groups=groups, next=f(("batch",), cache.next), pools=pools)


def _padded(f: OfArray, axes: Axes) -> Callable[[Array], Any]:
    """Wrap f for arrays whose first axes are these."""
    return lambda x: f((*axes, *(None,) * (x.ndim - len(axes)))[: x.ndim], x)


def _group(f: OfArray, group: GroupState, on: OnMesh | None) -> GroupState:
    if group.state is not None:
        group = dataclasses.replace(group, state=_state(f, group.state))
    heads = {part.shape[2] for s in group.parts for part in (s.lengths if isinstance(s, Paged) else s.pos,)}
    rows = jax.tree.map(lambda x: _row(f, x, heads), group.rows)
    return dataclasses.replace(group.with_parts([_segment(f, s, on) for s in group.parts]), rows=rows)


def _state(f: OfArray, state: State) -> State:
    def one(name: str, x: Any) -> Any:
        axes: Axes = ("layers", "batch", *(axes_of_state(name) or ()))
        return jax.tree.map(_padded(f, axes), x)

    return State({name: one(name, x) for name, x in state.data.items()})


def _row(f: OfArray, x: Array, heads: set[int]) -> Any:
    """Apply f to a method's per-row array; an axis as long as the KV heads is taken as theirs."""
    many = x.ndim > 3 and any(x.shape[2] % count == 0 for count in heads if count)
    return _padded(f, _LISTS if many else ("layers", "batch"))(x)


def _segment(f: OfArray, segment: Segment, on: OnMesh | None) -> Segment:
    if isinstance(segment, Paged):
        first, lengths = (_padded(f, _LISTS)(x) for x in (segment.first, segment.lengths))
        return dataclasses.replace(segment, first=first, lengths=lengths)
    return _slots(f, segment, (*_LISTS, "slots" if on is None or are_many(segment, on) else None))


def specs_of_slots(slots: Slots, on: OnMesh) -> Slots:
    """Build the partition spec of every array of a segment of slots."""
    axes = (*_LISTS, "slots" if are_many(slots, on) else None)
    return _slots(lambda axes, x: on.spec(axes, x.shape), slots, axes)


def are_many(slots: Slots, on: OnMesh) -> bool:
    """Whether a row's slots of one layer are large enough, in bytes, for the rules to split them."""
    layers, rows = slots.pos.shape[:2]
    return nbytes((slots.k, slots.v)) >= on.rules.slots_from * layers * rows


def lie_apart(segment: Segment, on: OnMesh) -> bool:
    """Whether the slots of a KV head are split over several devices."""
    if not isinstance(segment, Slots) or not are_many(segment, on):
        return False
    return len(on.spec((*_LISTS, "slots"), segment.pos.shape)) == 4


def _slots(f: OfArray, slots: Slots, axes: Axes) -> Slots:
    put = _padded(f, axes)
    near = slots.near
    if near is not None:
        whole = _padded(f, _LISTS)
        pages, used = jax.tree.map(whole, (near.pages, near.used))
        near = Near(_slots(f, near.slots, (*_LISTS, None)), pages, used, near.values_alone)
    return dataclasses.replace(
        slots,
        k=jax.tree.map(put, slots.k),
        v=jax.tree.map(put, slots.v),
        pos=put(slots.pos),
        bias=None if slots.bias is None else put(slots.bias),
        traces={name: put(x) for name, x in slots.traces.items()},
        summary={name: put(x) for name, x in slots.summary.items()},
        sums={name: _padded(f, _LISTS)(x) for name, x in slots.sums.items()},
        near=near,
    )


def _pool(f: OfArray, pool: Pages) -> Pages:
    return jax.tree.map(_padded(f, ("pages",)), pool)


def _memory(x: Array) -> str | None:
    """Return the memory kind of an array, if it is not the device's own memory."""
    return KIND if in_host(x) else None


def pinned(cache: Cache, on: OnMesh | None) -> Cache:
    """Inside a program: the cache with sharding constraints."""
    return cache if on is None else map_axes(lambda axes, x: on.pin(x, axes, _memory(x)), cache, on)


def pinned_to(x: Array, on: OnMesh | None, *axes: str | None) -> Array:
    """Inside a program: x with a sharding constraint for these logical axes."""
    return x if on is None else on.pin(x, axes)


def placed(cache: Cache, on: OnMesh | None) -> Cache:
    """Outside of programs: the cache moved to where the rules put it; arrays already there are not copied."""
    if on is None:
        return cache
    where = map_axes(lambda axes, x: on.sharding(axes, x.shape, _memory(x)), cache, on)
    moved = jax.device_put(dataclasses.replace(cache, added=None), dataclasses.replace(where, added=None))
    return dataclasses.replace(moved, spare=cache.spare, added=cache.added, on_mesh=on)


def check_rows(rows: int, on: OnMesh | None) -> None:
    """Raise InputError if this number of rows cannot be split as the rules say."""
    if on is not None:
        n = on.devices("batch")
        on.check("batch", rows, "rows", f"give {-(-rows // n) * n} rows or another multiple of {n}")
