"""Segments: from the slots that a method keeps to the segments of a cache.

`build` makes a group's dense segments from chosen slots (`kvjax.compress.pages` those in pages), `extend`
adds new tokens where nothing is evicted, `flush` moves full granules of the newest tokens into an encoded
body. No method by name.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.below import encoded_pair, of_granules, of_slots
from kvjax.compress.group import Alike, GroupMethod
from kvjax.compress.holes import empty_granules, gathered, in_order
from kvjax.compress.select import ComputedTokens
from kvjax.compress.selection import grown
from kvjax.compress.sinks import after_sinks, empty_slots, write_sinks
from kvjax.compress.summaries import summary_of_new, sums_with_new, with_summary
from kvjax.grammar.calls import counts_slots, restored
from kvjax.grammar.kinds import View, over_layers
from kvjax.grammar.read_kinds import Remembering
from kvjax.keep.select import slot_lists
from kvjax.ops.base.dispatch import alone, platform
from kvjax.place.host import in_its_memory
from kvjax.place.paged import put_traces
from kvjax.state.cache import GroupState, Paged, Pages, Segment, Slots
from kvjax.state.codes import dense, with_arrays
from kvjax.state.page_gather import gather_traces
from kvjax.state.write import pad_slots, write_blocks, write_slots

TILE, LANES, SUBLANES = 32, 128, 8


class ChunkHint(NamedTuple):
    """What one chunk of a prompt must know of the others (static); empty for a prompt that is read at once.

    slots: per group, how many empty slots a group that keeps everything gets for later chunks. lists: the
    most slots from which a head's pages are chosen, which decides how many pages there are; 0 for the present
    number.
    """

    slots: tuple[int, ...] = ()
    lists: int = 0


AT_ONCE = ChunkHint()


# --- building ------------------------------------------------------------------------------------------


def slots_needed(gm: GroupMethod, tokens: int, room: int, width: int) -> int:
    """Return the static capacity of one KV head: a function of method, bucket, `room` and platform only."""
    if gm.budget is None:
        return whole_tiles(tokens + room, width, gm.multiple)
    slots, keep = gm.budget.capacity(tokens) + room, gm.keep
    if keep is not None and gm.evicting and not counts_slots(keep):
        # More than the budget, because a token is attended to before others are evicted.
        due = keep.when.due_at(keep.budget.capacity(tokens + room))
        # If the budget is a share of the tokens, `room` bounds the number of tokens, and so the slots before
        # an eviction.
        bounded = keep.budget.ratio and not (keep.when.at_once or gm.split)
        slots = min(due, slots) if bounded else due
    return whole_tiles(slots, width, gm.multiple)


def whole_tiles(slots: int, width: int, devices: int = 1) -> int:
    """Round up to whole tiles of a TPU's memory, which are allocated in any case.

    A tile has up to 32 slots, or 128 slots with few channels. Devices that share a head's slots hold equally
    many each.
    """
    tile = (LANES if width % LANES else TILE) if platform() == "tpu" else 1
    return -(-slots // (tile * devices)) * tile * devices


def whole_granules(granules: int) -> int:
    """Round a number of granules up to whole tiles of a TPU's memory, because each has one row of scales."""
    return -(-granules // SUBLANES) * SUBLANES if platform() == "tpu" else granules


def build(gm: GroupMethod, view: View, kept: Array | None, tokens: int, room: int) -> GroupState:
    """Dense segments that hold the kept slots of a group, with `room` free slots.

    Like `flush_in_place` it is traced once for all groups that do the same.
    """
    if gm.codec_arrays or gm.host is not None:
        return _built(gm, view, kept, tokens, room)
    return _traced_build(Alike(gm.same, gm), view, kept, tokens, room)


@partial(jax.jit, static_argnums=(0, 3, 4), inline=True)
def _traced_build(group: Alike, view: View, kept: Array | None, tokens: int, room: int) -> GroupState:
    return _built(group.gm, view, kept, tokens, room)


def _built(gm: GroupMethod, view: View, kept: Array | None, tokens: int, room: int) -> GroupState:
    capacity = slots_needed(gm, tokens, room, view.k.shape[-1])
    live = view.pos >= 0
    kept = live if kept is None else kept & live
    whole = kept.shape[-1] <= capacity and gm.keep is None and not gm.sinks
    if whole and not gm.split:
        plain = whole_slots(gm, view)
        return GroupState(tail=placed_tail(gm, pad_slots(plain, capacity - plain.capacity)))
    sinks = first_tokens(gm, view, kept) if gm.sinks else None
    if sinks is not None:
        kept &= view.pos >= gm.sinks
        if gm.keep is None and not gm.split:
            capacity = whole_tiles(max(capacity - gm.sinks, 1), view.k.shape[-1], gm.multiple)
    slots = take(gm, view, kept, capacity)
    if gm.keep is not None and gm.keep.lower is not None:
        return GroupState((_lower(gm, view, live & ~kept, tokens, room),), placed_tail(gm, slots))
    if not gm.split:
        return GroupState(tail=placed_tail(gm, slots), sinks=sinks)
    # The tail is filled as if all tokens were new, then flushed into an empty body.
    tail = _sized(slots, capacity)
    body, tail = flush(gm, empty_body(gm, tail, body_slots(gm, capacity)), tail)
    body = in_its_memory(gm.host, gm.read, body)
    return GroupState((body,), tail, sinks=sinks)


def placed_tail(gm: GroupMethod, slots: Slots) -> Slots:
    """Encode the slots of a group without a body, and place them in device or host memory.

    Raises NotImplementedError for slots in host memory that steps change on a GPU.
    """
    if gm.host is not None and gm.rewrites and platform() == "gpu":
        raise NotImplementedError(
            f"{gm.host!r} was given beside a keep that merges or encodes slots anew while decoding, and XLA "
            "for GPUs copies what it changes within host memory: use a keep that only evicts, such as h2o, "
            "or leave the host out"
        )
    slots = slots if gm.codecs == (None, None) else encoded(slots, gm)
    return slots if gm.host is None else in_its_memory(gm.host, gm.read, slots)


def first_tokens(gm: GroupMethod, view: View, kept: Bool[Array, "Lg B K S"]) -> Slots:
    """Return the kept slots of every row's first tokens, unencoded, in a group that stores them so."""
    return take(gm, view, kept & (view.pos < gm.sinks), gm.sinks)


def _lower(gm: GroupMethod, view: View, leaving: Bool[Array, "Lg B K S"], tokens: int, room: int) -> Slots:
    """Build the second tier: slots evicted from the first, with free slots for those evicted in steps."""
    assert gm.keep is not None and gm.keep.lower is not None
    most = tokens + room if gm.evicting else tokens
    size = max(most - gm.keep.budget.capacity(most) + restored(gm.keep), 1)
    granule = gm.keep.lower.granule
    size = -(-whole_tiles(size, view.k.shape[-1], gm.multiple) // granule) * granule
    slots = take(gm, view, leaving, size)
    return placed_tail(gm.replaced(codecs=(gm.keep.lower.keys, gm.keep.lower.values)), slots)


def with_empty_tier(gm: GroupMethod, group: GroupState, view: View, tokens: int, room: int) -> GroupState:
    """Build the empty second tier that the steps of a group that has evicted nothing yet need, if any."""
    if not gm.evicting or gm.keep is None or gm.keep.lower is None:
        return group
    nothing = jnp.zeros(view.pos.shape, bool)
    return dataclasses.replace(group, bodies=(_lower(gm, view, nothing, tokens, room),))


def body_slots(gm: GroupMethod, capacity: int) -> int:
    """How many slots of the encoded body `capacity` tokens need, beside a tail."""
    # Holes take up to a granule less one slot, so a head that evicts needs one more granule.
    more = gm.granule - 1 if gm.evicting else 0
    return whole_granules(max((capacity - gm.residual + more) // gm.granule, 1)) * gm.granule


def capacity_of(gm: GroupMethod, slots: int) -> int:
    """How many slots a dense group has that `build` makes for `slots`."""
    return body_slots(gm, slots) + gm.residual + gm.granule if gm.split else slots


def empty_body(gm: GroupMethod, like: Slots, capacity: int) -> Slots:
    """Build an encoded body of empty slots from shapes, since encoding constants stalls the compiler."""

    def make(slots: Slots) -> Slots:
        body = with_summary(gm, encoded(_sized(slots, capacity), of_slots(gm, capacity)))
        # Traces that only a read needs are stored in its summaries.
        traces = {} if isinstance(gm.read, Remembering) and gm.keep is None else body.traces
        return dataclasses.replace(body, traces=traces)

    body = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(make, like))
    return dataclasses.replace(body, pos=jnp.full_like(body.pos, -1))


def whole_slots(gm: GroupMethod, view: View) -> Slots:
    """Return all slots of a view unchanged; values that are channels of the keys are not stored again."""
    v = view.v if gm.shared is None else None
    return Slots(view.k, v, view.pos, view.bias, view.traces, shared=gm.shared or 0)


def take(gm: GroupMethod, view: View, kept: Bool[Array, "Lg B K S"], capacity: int) -> Slots:
    """Return the kept slots in slot order, padded to `capacity` with empty ones."""
    index, used = slot_lists(kept, capacity)

    def pick(x: Array, fill: int) -> Array:
        extra = x.ndim - index.ndim
        i, u = (y.reshape(*y.shape, *(1,) * extra) for y in (index, used))
        return jnp.where(u, jnp.take_along_axis(x, i, axis=3), jnp.asarray(fill, x.dtype))

    taken = jax.tree.map(lambda x: pick(x, 0), whole_slots(gm, view))
    return dataclasses.replace(taken, pos=pick(view.pos, -1))


def taken_slots(gm: GroupMethod, view: View, kept: Bool[Array, "Lg B K S"], tokens: int, room: int) -> Slots:
    """Encode the kept slots of a group, with `room` free slots."""
    return encoded(take(gm, view, kept, slots_needed(gm, tokens, room, view.k.shape[-1])), gm)


def encoded(slots: Slots, gm: GroupMethod) -> Slots:
    v = None if slots.v is None else dense(slots.v)
    k, v = encoded_pair(gm, dense(slots.k), v, gm.codec_arrays)
    return dataclasses.replace(slots, k=k, v=v)


def _sized(slots: Slots, capacity: int) -> Slots:
    """Unencoded slots cut or padded to `capacity`."""
    cut = jax.tree.map(lambda x: x[:, :, :, :capacity], slots)
    return pad_slots(cut, capacity - cut.capacity)


def is_full(gm: GroupMethod, tail: Slots) -> Bool[Array, ""]:
    """Whether the tail of any KV head has a whole granule to flush into the body."""
    return ((tail.pos >= 0).sum(-1) >= gm.residual + gm.granule).any()


def flush_in_place(gm: GroupMethod, body: Slots, tail: Slots) -> tuple[Slots, Slots]:
    """`flush` of a tail of its usual capacity, row by row of a layer, so that no layer is held twice.

    It is traced once for all groups that do the same, and the trace is repeated.
    """
    return _by_row(gm, body, tail) if gm.codec_arrays else _traced_by_row(Alike(gm.same, gm), body, tail)


@partial(jax.jit, static_argnums=0, inline=True)
def _traced_by_row(group: Alike, body: Slots, tail: Slots) -> tuple[Slots, Slots]:
    return _by_row(group.gm, body, tail)


def _by_row(gm: GroupMethod, body: Slots, tail: Slots) -> tuple[Slots, Slots]:
    layers, rows = tail.pos.shape[:2]
    # A row of a layer is processed like a layer of one row. Rows on several devices stay together.
    apart = alone(body, tail)
    steps = layers * rows if apart else layers

    def one(at: Array, state: tuple[Slots, Slots]) -> tuple[Slots, Slots]:
        body, tail = jax.tree.map(lambda x: x.reshape(steps, 1, -1, *x.shape[2:]), state) if apart else state
        own = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, at, 1), tail)
        mine = gm.of_layer(at // rows, at % rows) if apart else gm.of_layer(at)
        body, own = flush(mine, body, own, at)
        tail = jax.tree.map(lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, at, 0), tail, own)
        return flat((body, tail))

    def flat(tree: tuple[Slots, Slots]) -> tuple[Slots, Slots]:
        """Merge the axes of layers and rows: XLA for CPUs would copy a body to move an axis of one row."""
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree) if apart else tree

    done = jax.lax.fori_loop(0, steps, one, flat((body, tail)))
    return jax.tree.map(lambda new, x: new.reshape(x.shape), done, (body, tail))


def flush(gm: GroupMethod, body: Slots, tail: Slots, layer: int | Array = 0) -> tuple[Slots, Slots]:
    """Move the oldest full granules of the tail into the body, leaving `residual` tokens or a few more.

    The tail's live slots must be its first ones, in order, unless decode steps evict; `layer`: the index of
    the tail's first layer in the body. Returns the body, and the tail with its usual capacity of residual +
    granule slots.
    """
    g = gm.granule
    tail = in_order(tail) if gm.evicting else tail
    count = (tail.pos >= 0).sum(-1, dtype=jnp.int32)
    moved = jnp.maximum(count - gm.residual, 0) // g
    most = max((tail.capacity - gm.residual) // g, 0)
    if most:
        body = gathered(gm, body, moved > 0, layer) if gm.evicting and g > 1 else body
        held = jax.lax.dynamic_slice_in_dim(body.pos, layer, tail.pos.shape[0])
        row = empty_granules(held, g, moved, most)
        moved = (row >= 0).sum(-1, dtype=jnp.int32)
        body = _write_granules(gm, body, row, jax.tree.map(lambda x: x[:, :, :, : most * g], tail), layer)
    return body, _rested(tail, count, moved, g, gm.residual + g)


def _rested(tail: Slots, count: Array, moved: Array, granule: int, capacity: int) -> Slots:
    """Remove the first `moved` granules of the tail, which gets `capacity` slots."""
    source = moved[..., None] * granule + jnp.arange(capacity, dtype=jnp.int32)[None, None, None]
    used = source < count[..., None]

    def shift(x: Array) -> Array:
        extra = (1,) * (x.ndim - source.ndim)
        if x.shape[3] == capacity:
            # At most one granule was moved. A gather would hold every slot twice.
            left = (moved > 0).reshape(*moved.shape, 1, *extra)
            return jnp.where(left, jnp.roll(x, -granule, axis=3), x)
        index = jnp.minimum(source, x.shape[3] - 1).reshape(*source.shape, *extra)
        return jnp.take_along_axis(x, index, axis=3)

    rested = jax.tree.map(shift, tail)
    return dataclasses.replace(rested, pos=jnp.where(used, rested.pos, -1))


def _write_granules(
    gm: GroupMethod, body: Slots, row: Int[Array, "l B K F"], new: Slots, layer: int | Array
) -> Slots:
    """Write whole granules `new` [.., F * g, ..] to granule rows of the body; rows < 0 write nothing."""

    def put(old: Array, fresh: Array) -> Array:
        return write_blocks(old, row, fresh, layer)

    v = None if new.v is None else dense(new.v)
    k, v = encoded_pair(gm, dense(new.k), v, of_granules(gm, row))
    summary = summary_of_new(gm, body, k, new, layer)
    moves = jnp.repeat(row >= 0, gm.granule, axis=3)
    return dataclasses.replace(
        body,
        k=jax.tree.map(put, body.k, k),
        v=None if body.v is None else jax.tree.map(put, body.v, v),
        pos=put(body.pos, new.pos),
        bias=None if body.bias is None else put(body.bias, new.bias),  # type: ignore[arg-type]
        traces={n: put(x, new.traces[n]) for n, x in body.traces.items()},
        summary={n: put(x, summary[n]) for n, x in body.summary.items()},
        sums=sums_with_new(gm, body, dataclasses.replace(new, k=k, v=v), moves, layer),
    )


# --- extending -----------------------------------------------------------------------------------------


def extend(gm: GroupMethod, past: GroupState, fresh: ComputedTokens, pos: Int[Array, "B T"]) -> GroupState:
    """Append new tokens to a group without evicting any. The tail must have free slots for them."""
    assert fresh.k is not None
    layers, b, heads, t, _ = fresh.k.shape
    where = jnp.broadcast_to(pos[None, :, None], (layers, b, heads, t))
    tail = past.tail
    assert tail is not None
    start = fresh.traces
    if fresh.masses:
        start = grown(gm.traces, start, fresh.masses[-1])
        pairs = zip(past.parts, fresh.masses, strict=False)
        past = past.with_parts([_grown_slots(gm, s, seen) for s, seen in pairs])
        tail = past.tail
        assert tail is not None
    past, tail_pos = write_sinks(gm, past, fresh.k, fresh.v, where, start), after_sinks(gm, past, where)
    if gm.split:
        tail = pad_slots(tail, t)
    empty, free = empty_slots(past, tail.pos, tail_pos)
    slot = jnp.where((tail_pos >= 0) & free, empty, -1)
    tail = write_slots(tail, slot, fresh.k, fresh.v, where, traces=start)
    if not gm.split:
        return past.with_tail(tail)
    *pages, body = past.bodies
    assert isinstance(body, Slots)
    body, tail = flush(gm, with_arrays(body, ()), tail)
    return dataclasses.replace(past, bodies=(*pages, body), tail=tail)


def _grown_slots(gm: GroupMethod, segment: Segment, received: dict[str, Array]) -> Segment:
    """Update a segment's traces, given what its slots received; the traces of pages are in their pool."""
    if isinstance(segment, Paged):
        return segment
    return dataclasses.replace(segment, traces=grown(gm.traces, segment.traces, received))


def remember_in_pages(
    gm: GroupMethod,
    group: GroupState,
    pools: tuple[Pages, ...],
    received: tuple[dict[str, Float[Array, "_ _ _ _"]], ...],
) -> tuple[Pages, ...]:
    """Pools with updated traces, given what their slots received from new queries."""
    for segment, seen in zip(group.bodies, received, strict=False):
        if isinstance(segment, Paged) and gm.traces:
            pool = pools[segment.pool]
            old = over_layers(lambda s, pool=pool: gather_traces(s, pool), segment)
            pool = put_traces(segment, pool, grown(gm.traces, old, seen))
            pools = (*pools[: segment.pool], pool, *pools[segment.pool + 1 :])
    return pools
