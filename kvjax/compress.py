"""Storage acts: from the slots a method keeps to the segments of a cache.

Three acts: `build` makes a group's segments from chosen slots, `extend` adds new tokens to segments that
evict nothing, `flush` moves full granules of the newest tokens into the encoded body. Which slots are
chosen is `choose`; nothing here knows a method by name.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import (
    Cache,
    Pages,
    Segment,
    Slots,
    dense,
    encode,
    gather_pages,
    nbytes,
    pad_slots,
    write_rows,
    write_slots,
)
from kvjax.grammar import STEP, AttentionSpec, Budget, Keep, Method, Seen, View, over_layers
from kvjax.keep.budget import Uniform
from kvjax.keep.score import Position
from kvjax.keep.select import slot_lists, top
from kvjax.place.paged import build_pages, pool_pages


class GroupMethod(NamedTuple):
    """What a sentence means for one group of layers."""

    keep: Keep | None
    codecs: tuple[Any, Any]
    granule: int
    residual: int
    read: Any
    first: int

    @property
    def paged(self) -> bool:
        return self.keep is not None and not self.keep.allocate.uniform

    @property
    def evicting(self) -> bool:
        return self.keep is not None and self.keep.when == STEP

    @property
    def split(self) -> bool:
        """Whether the group has an encoded body and a plain tail, rather than one segment."""
        return not self.paged and (self.granule > 1 or self.residual > 0)


def group_method(method: Method, first: int, window: int | None) -> GroupMethod:
    """The part of a sentence that a group of layers follows.

    Windowed layers keep their window and nothing else (token-wise codecs still encode them); the first
    `skip_layers` layers keep everything.
    """
    keep, store, read = method.keep, method.store, method.read
    codecs = (None, None) if store is None else (store.keys, store.values)
    granule = 1 if store is None else store.granule
    residual = 0 if store is None else store.residual
    if window is not None:
        plain = granule > 1 or residual > 0
        rule = Keep(Position(), Budget(window - 1), Uniform(), when=STEP)
        return GroupMethod(rule, (None, None) if plain else codecs, 1, 0, None, first)
    if keep is not None and (first < keep.skip_layers or keep.score is None):
        keep = None
    if read is not None and first < read.skip_layers:
        read = None
    if read is not None:
        granule = math.lcm(granule, read.granule)
    return GroupMethod(keep, codecs, granule, residual, read, first)


class Fresh(NamedTuple):
    """What the layers of a group computed for new tokens: stored keys, values, and what was observed.

    masses: attention mass of (each past segment ..., the new tokens), empty where nobody asked.
    """

    k: Float[Array, "Lg B K T H"]
    v: Float[Array, "Lg B K T V"]
    observed: dict[str, Any]
    masses: tuple[Float[Array, "Lg B K S"], ...]


# --- the union of past and new, and what stays of it ----------------------------------------------------


def union(
    gm: GroupMethod, past: tuple[Segment, ...], pools: tuple[Pages, ...], fresh: Fresh, pos: Int[Array, "B T"]
) -> View:
    """All slots of a group, old and new, decoded and in position order, empty ones last: [Lg, B, K, S, ...].

    Statistics that the keep's score remembers start from, and grow by, the mass observed on each slot.
    """
    stats = gm.keep.score.stats if gm.keep is not None and gm.keep.score is not None else frozenset()
    layers, b, heads, t, _ = fresh.k.shape
    new_pos = jnp.broadcast_to(pos[None, :, None], (layers, b, heads, t))
    mass = fresh.masses[-1] if fresh.masses else jnp.zeros(new_pos.shape, jnp.float32)
    views = [_decoded(s, pools, stats) for s in past]
    for i, seen in enumerate(fresh.masses[:-1]):
        views[i] = views[i]._replace(stats={n: x + seen for n, x in views[i].stats.items()})
    views.append(View(fresh.k, fresh.v, new_pos, None, {n: mass for n in stats}))
    if any(w.bias is not None for w in views):
        views = [w._replace(bias=jnp.zeros(w.pos.shape)) if w.bias is None else w for w in views]
    if len(views) == 1:
        return views[0]
    both = jax.tree.map(lambda *xs: jnp.concatenate(xs, axis=3), *views)
    # Smoothing looks at neighbours, granules are filled in order, and ties go to the older token.
    order = jnp.argsort(jnp.where(both.pos < 0, jnp.iinfo(jnp.int32).max, both.pos), axis=3, stable=True)
    return jax.tree.map(
        lambda x: jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 4)), axis=3), both
    )


def _decoded(segment: Segment, pools: tuple[Pages, ...], stats: frozenset[str]) -> View:
    if isinstance(segment, Slots):
        old = {n: segment.stats.get(n, jnp.zeros(segment.pos.shape, jnp.float32)) for n in stats}
        return View(*segment.keys(), old)
    keys = over_layers(lambda s: gather_pages(s, pools[segment.pool]), segment)
    return View(*keys, {n: jnp.zeros(keys.pos.shape, jnp.float32) for n in stats})


def score_slots(
    gm: GroupMethod, view: View, fresh: Fresh, length: Int[Array, "B"], attention: AttentionSpec
) -> Float[Array, "Lg B K S"]:
    """The keep's scores, +inf where a pattern protects and -inf where a slot is empty."""
    assert gm.keep is not None and gm.keep.score is not None
    keep, score = gm.keep, gm.keep.score
    n = keep.budget.count(length)
    numbers = gm.first + jnp.arange(view.pos.shape[0], dtype=jnp.int32)

    def one(layer: Array, view: View, observed: dict[str, Any]) -> Float[Array, "B K S"]:
        s = score(view, Seen(observed, None, length, n, layer, attention)).astype(jnp.float32)
        for pattern in keep.protect:
            s = jnp.where(pattern(view.pos, length, n), jnp.inf, s)
        return jnp.where(view.pos < 0, -jnp.inf, s)

    return over_layers(one, numbers, view, fresh.observed)


def merge_evicted(
    gm: GroupMethod,
    view: View,
    kept: Bool[Array, "Lg B K S"],
    fresh: Fresh,
    length: Int[Array, "B"],
    attention: AttentionSpec,
) -> View:
    """The view with every live slot that is not kept folded into the kept ones, as the keep's merge says."""
    assert gm.keep is not None
    merge, n = gm.keep.merge, gm.keep.budget.count(length)
    numbers = gm.first + jnp.arange(view.pos.shape[0], dtype=jnp.int32)
    slot = jax.lax.broadcasted_iota(jnp.int32, view.pos.shape, 3)
    leaving = jnp.where((view.pos >= 0) & ~kept, slot, view.pos.shape[-1])

    def one(layer: Array, view: View, kept: Array, leaving: Array, observed: dict[str, Any]) -> View:
        return merge(view, kept, leaving, Seen(observed, None, length, n, layer, attention))

    return over_layers(one, numbers, view, kept, leaving, fresh.observed)


def choose(
    keeps: dict[int, Keep | None], scores: dict[int, Float[Array, "_ B K S"]], length: Int[Array, "B"]
) -> dict[int, Bool[Array, "_ B K S"]]:
    """Which slots stay, per group; counts are shared over all layers that follow the same keep."""
    chosen: dict[int, Array] = {}
    for keep in dict.fromkeys(keeps.values()):
        assert keep is not None
        where = [i for i, k in keeps.items() if k == keep]
        stacked = jnp.concatenate([scores[i] for i in where])
        counts = keep.allocate.counts(stacked, keep.budget.count(length))
        at = 0
        for i in where:
            size = scores[i].shape[0]
            chosen[i] = top(scores[i], counts[at : at + size])
            at += size
    return chosen


# --- building ------------------------------------------------------------------------------------------


def slots_needed(gm: GroupMethod, tokens: int, room: int) -> int:
    """Static capacity of one head's list: a function of method, bucket and room only."""
    if gm.keep is None:
        return tokens + room
    if gm.evicting:
        # One more than the budget: a token is attended before the victim leaves.
        return gm.keep.budget.capacity(tokens + room) + 1
    return gm.keep.budget.capacity(tokens) + room


def build(gm: GroupMethod, view: View, kept: Array | None, tokens: int, room: int) -> tuple[Segment, ...]:
    """Dense segments holding the kept slots of a group, with room for `room` more tokens."""
    capacity = slots_needed(gm, tokens, room)
    live = view.pos >= 0
    kept = live if kept is None else kept & live
    whole = kept.shape[-1] <= capacity and gm.keep is None
    if whole and not gm.split:
        plain = Slots(view.k, view.v, view.pos, view.bias, view.stats)
        return (_encoded(pad_slots(plain, capacity - plain.capacity), gm),)
    slots = _take(view, kept, capacity)
    if not gm.split:
        return (_encoded(slots, gm),)
    # The tail is filled as if everything were new, then flushed into an empty body.
    tail = _sized(slots, capacity)
    granules = max((capacity - gm.residual) // gm.granule, 1)
    return flush(gm, _empty_body(gm, tail, granules * gm.granule), tail)


def _empty_body(gm: GroupMethod, like: Slots, capacity: int) -> Slots:
    """An encoded body of empty slots; made from shapes, since encoding constants stalls the compiler."""

    def make(slots: Slots) -> Slots:
        body = _encoded(_sized(slots, capacity), gm)
        summary = {} if gm.read is None else gm.read.summarise(dense(body.k))
        return dataclasses.replace(body, summary=summary)

    body = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make, like))
    return dataclasses.replace(body, pos=jnp.full_like(body.pos, -1))


def _take(view: View, kept: Bool[Array, "Lg B K S"], capacity: int) -> Slots:
    """The kept slots in slot order, `capacity` of them, empty ones behind."""
    index, used = slot_lists(kept, capacity)

    def pick(x: Array, fill: int) -> Array:
        extra = x.ndim - index.ndim
        i, u = (y.reshape(*y.shape, *(1,) * extra) for y in (index, used))
        return jnp.where(u, jnp.take_along_axis(x, i, axis=3), jnp.asarray(fill, x.dtype))

    bias = None if view.bias is None else pick(view.bias, 0)
    stats = {n: pick(x, 0) for n, x in view.stats.items()}
    return Slots(pick(view.k, 0), pick(view.v, 0), pick(view.pos, -1), bias, stats)


def _encoded(slots: Slots, gm: GroupMethod) -> Slots:
    return dataclasses.replace(slots, k=encode(slots.k, gm.codecs[0]), v=encode(slots.v, gm.codecs[1]))


def _sized(slots: Slots, capacity: int) -> Slots:
    """Plain slots cut or padded to `capacity`."""
    cut = jax.tree.map(lambda x: x[:, :, :, :capacity], slots)
    return pad_slots(cut, capacity - cut.capacity)


def flush(gm: GroupMethod, body: Slots, tail: Slots) -> tuple[Slots, Slots]:
    """Moves the oldest full granules of the tail into the body, leaving `residual` tokens or a few more.

    The tail's live slots must be its first ones, in order. Returns it with its resting capacity of
    residual + granule slots.
    """
    g = gm.granule
    count = (tail.pos >= 0).sum(-1, dtype=jnp.int32)
    moved = jnp.maximum(count - gm.residual, 0) // g
    most = max((tail.capacity - gm.residual) // g, 0)
    if most:
        start = (body.pos >= 0).sum(-1, dtype=jnp.int32) // g
        index = jnp.arange(most, dtype=jnp.int32)[None, None, None]
        row = jnp.where(index < moved[..., None], start[..., None] + index, -1)
        body = _write_granules(gm, body, row, jax.tree.map(lambda x: x[:, :, :, : most * g], tail))
    rest = gm.residual + g
    source = moved[..., None] * g + jnp.arange(rest, dtype=jnp.int32)[None, None, None]
    used = source < count[..., None]
    source = jnp.minimum(source, tail.capacity - 1)

    def shift(x: Array, fill: int = 0) -> Array:
        extra = (1,) * (x.ndim - source.ndim)
        picked = jnp.take_along_axis(x, source.reshape(*source.shape, *extra), axis=3)
        return jnp.where(used.reshape(*used.shape, *extra), picked, jnp.asarray(fill, x.dtype))

    rested = jax.tree.map(shift, tail)
    return body, dataclasses.replace(rested, pos=shift(tail.pos, -1))


def _write_granules(gm: GroupMethod, body: Slots, row: Int[Array, "Lg B K F"], new: Slots) -> Slots:
    """Whole granules `new` [.., F * g, ..] into granule rows of the body; rows < 0 write nothing."""
    g = gm.granule

    def put(old: Array, fresh: Array) -> Array:
        per = old.shape[3] * g // body.capacity
        blocks = old.reshape(*old.shape[:3], -1, per, *old.shape[4:])
        return write_rows(blocks, row, fresh.reshape(*fresh.shape[:3], -1, per, *fresh.shape[4:])).reshape(
            old.shape
        )

    k, v = encode(dense(new.k), gm.codecs[0]), encode(dense(new.v), gm.codecs[1])
    summary = body.summary
    if gm.read is not None:
        fresh = gm.read.summarise(dense(k))
        summary = {n: put(x, fresh[n]) for n, x in summary.items()}
    return dataclasses.replace(
        body,
        k=jax.tree.map(put, body.k, k),
        v=jax.tree.map(put, body.v, v),
        pos=put(body.pos, new.pos),
        bias=None if body.bias is None else put(body.bias, new.bias),  # type: ignore[arg-type]
        summary=summary,
    )


def build_group_pages(
    chosen: list[tuple[GroupMethod, View, Bool[Array, "_ B K S"]]], tokens: int, room: int
) -> tuple[list[tuple[Segment, ...]], tuple[Pages, ...]]:
    """Paged bodies of groups, each with a dense tail of `room` slots for new tokens.

    One pool for all of them where the allocation moves slots between layers, else one per group.
    """
    keep = chosen[0][0].keep
    assert keep is not None
    layers = sum(v.pos.shape[0] for _, v, _ in chosen)
    _, b, heads, slots = chosen[0][1].pos.shape
    n = min(keep.budget.capacity(tokens), slots)
    most = keep.allocate.layer_slots(n, slots, layers, heads)
    shares, at = [], 0
    for _, view, _ in chosen:
        shares.append(sum(most[at : at + view.pos.shape[0]]))
        at += view.pos.shape[0]
    batches = [chosen] if keep.allocate.across_layers else [[c] for c in chosen]
    sizes = [sum(shares)] if keep.allocate.across_layers else shares
    groups: list[tuple[Segment, ...]] = []
    pools = []
    for number, (batch, size) in enumerate(zip(batches, sizes, strict=True)):
        gms, views, kept = zip(*batch, strict=True)
        lists = sum(v.pos.shape[0] for v in views) * b * heads
        pages = pool_pages(b * size, lists, keep.page)
        indices, pool = build_pages(
            kept, views, page=keep.page, pages=pages, codecs=gms[0].codecs, number=number
        )
        pools.append(pool)
        groups += [
            (index, _empty_tail(gm, v, room)) for gm, v, index in zip(gms, views, indices, strict=True)
        ]
    return groups, tuple(pools)


def _empty_tail(gm: GroupMethod, view: View, room: int) -> Slots:
    empty = Slots(*jax.tree.map(lambda x: x[:, :, :, :0], view[:4]))
    return _encoded(pad_slots(empty, max(room, 1)), gm)


# --- extending -----------------------------------------------------------------------------------------


def extend(
    gm: GroupMethod, past: tuple[Segment, ...], fresh: Fresh, pos: Int[Array, "B T"]
) -> tuple[Segment, ...]:
    """New tokens behind what a group holds; nothing is evicted. The last segment must have room."""
    layers, b, heads, t, _ = fresh.k.shape
    where = jnp.broadcast_to(pos[None, :, None], (layers, b, heads, t))
    tail = past[-1]
    assert isinstance(tail, Slots)
    masses = {n: fresh.masses[-1] for n in tail.stats} if fresh.masses else {}
    if fresh.masses:
        seen = fresh.masses[len(past) - 1]
        tail = dataclasses.replace(tail, stats={n: x + seen for n, x in tail.stats.items()})
    if gm.split:
        tail = pad_slots(tail, t)
    empty, free = slot_lists(tail.pos < 0, t)
    slot = jnp.where((where >= 0) & free, empty, -1)
    tail = write_slots(tail, slot, fresh.k, fresh.v, where, stats=masses)
    if not gm.split:
        return (*past[:-1], tail)
    body = past[0]
    assert isinstance(body, Slots)
    return flush(gm, body, tail)


def free_slots(gms: tuple[GroupMethod, ...], cache: Cache) -> Int[Array, "B"]:
    """Per row, how many more tokens fit; a large number where every group makes room by itself."""
    free = [jnp.full(cache.next.shape, 2**30, jnp.int32)]
    for gm, group in zip(gms, cache.groups, strict=True):
        if gm.evicting:
            continue
        used = [s for s in group if isinstance(s, Slots)]
        room = sum((s.pos < 0).sum(-1, dtype=jnp.int32) for s in used)
        # A full body cannot take the granule that a full tail would flush.
        free.append((room - int(gm.split)).min((0, 2)))
    return jnp.stack(free).min(0)


def reserve(gms: tuple[GroupMethod, ...], cache: Cache, room: int) -> Cache:
    """The cache with `room` more empty slots per head in every group that does not evict."""

    def grow(gm: GroupMethod, group: tuple[Segment, ...]) -> tuple[Segment, ...]:
        if gm.evicting:
            return group
        if not gm.split:
            return (*group[:-1], pad_slots(group[-1], room))  # type: ignore[arg-type]
        body, tail = group
        return (_pad_granules(body, -(-room // gm.granule), gm.granule), tail)  # type: ignore[arg-type]

    groups = tuple(grow(g, x) for g, x in zip(gms, cache.groups, strict=True))
    return dataclasses.replace(cache, groups=groups)


def _pad_granules(body: Slots, granules: int, granule: int) -> Slots:
    def grow(x: Array, fill: int = 0) -> Array:
        more = x.shape[3] * granule // body.capacity * granules
        return jnp.pad(x, [(0, 0)] * 3 + [(0, more)] + [(0, 0)] * (x.ndim - 4), constant_values=fill)

    padded = jax.tree.map(grow, body)
    return dataclasses.replace(padded, pos=grow(body.pos, -1))


def unread_bytes(gm: GroupMethod, group: tuple[Segment, ...]) -> int:
    """Bytes of keys and values that a decode step leaves unread because a read method visits some pages."""
    if gm.read is None:
        return 0
    body = group[0]
    assert isinstance(body, Slots)
    visited = gm.read.pages_visited(body.capacity) * gm.granule
    return nbytes((body.k, body.v)) * (body.capacity - visited) // body.capacity
