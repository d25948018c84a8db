"""What a read method stores with the slots of a body: summaries per page, and sums per KV head."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.computed_keys import COMPUTED
from kvjax.compress.group import GroupMethod
from kvjax.grammar.kinds import over_layers
from kvjax.grammar.read_kinds import (
    Copying,
    Counted,
    EstimatingRest,
    FittedBlocks,
    Learning,
    LearningFromQueries,
    Remembering,
    Tracing,
)
from kvjax.models.attending import rotated
from kvjax.state.cache import GroupState, Paged, Pages, Slots
from kvjax.state.codes import CodecArrays, Codes, dense, with_arrays
from kvjax.state.page_gather import gather_pages, gather_traces


def with_summary(gm: GroupMethod, body: Slots) -> Slots:
    """Add to a body the summaries and sums of all its slots that its method needs."""
    if gm.read is None:
        return body
    body, bare = with_arrays(body, gm.codec_arrays), body
    k = as_ranked(gm, dense(body.k), body.pos)
    # What is learnt from queries, too, is learnt at the end of a prefill.
    sums = {}
    if isinstance(gm.read, Learning) and not isinstance(gm.read, LearningFromQueries):
        sums = gm.read.learn(k, body.pos, *((body.traces,) if isinstance(gm.read, Tracing) else ()))
    sums = sums | _totals(gm, k, body.keys().v, body.pos, sums, body.traces)
    summary = _summarised(gm.read, k, sums, body.traces, body.v, _fitted(gm))
    return dataclasses.replace(bare, summary=summary, sums=sums)


def as_ranked(
    gm: GroupMethod, k: Float[Array, "l B K S _"], pos: Int[Array, "l B K S"]
) -> Float[Array, "l B K S H"]:
    """Return stored keys as a read ranks them: rotated by their positions, and computed from latents."""
    if gm.computed is not None:
        return gm.computed.keys(dict(gm.codec_arrays)[COMPUTED], k, pos)
    if gm.rope is None:
        return k
    rope, length = gm.rope, jnp.zeros(pos.shape[1], jnp.int32)
    return over_layers(lambda k, pos: rotated(rope, k, jnp.maximum(pos, 0), length), k, pos)


def _fitted(gm: GroupMethod) -> dict[str, Array] | None:
    """Return the fitted arrays of the group's layers for its read; None if it has none."""
    word = gm.read.fitted if isinstance(gm.read, FittedBlocks) else None
    return None if word is None else dict(gm.codec_arrays)[word.digest]


def _summarised(
    read: Any, k: Array, sums: dict[str, Array], traces: dict[str, Array], v: Array | Codes | None,
    fitted: dict[str, Array] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Summaries of slots with these keys, rotated for queries, and values as they are stored.

    fitted: the arrays of the layers on the first axis of the keys, if the read has some.
    """
    if isinstance(read, Copying):
        assert v is not None
        return read.summarise(k, dense(v))
    if isinstance(read, Learning):
        return read.summarise(k, sums or None)
    if isinstance(read, FittedBlocks):
        return read.summarise(k, fitted)
    return read.summarise(k, traces) if isinstance(read, Remembering) else read.summarise(k)


def _totals(
    gm: GroupMethod, k: Array, v: Array, pos: Array, sums: dict[str, Array], traces: dict[str, Array]
) -> dict[str, Array]:
    """Sum over slots what a read sums, of which those with pos -1 do not count; {} if it sums nothing.

    k: rotated for queries. sums: what it has learnt.
    """
    if not isinstance(gm.read, EstimatingRest):
        return {}
    counts = jnp.where((pos >= 0)[..., None], v, jnp.zeros((), v.dtype))
    return gm.read.total(Counted(k, counts, pos, _summarised(gm.read, k, sums, traces, v)))


def _of_layers(sums: dict[str, Array], layer: int | Array, layers: int) -> dict[str, Array]:
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, layer, layers), sums)


def summary_of_new(
    gm: GroupMethod, body: Slots, k: Array | Codes, new: Slots, layer: int | Array
) -> dict[str, Array]:
    """Summaries of whole granules that are written to l layers of a body from `layer` on.

    k: their keys [l, B, K, ...] as they are stored. new: the slots they summarise.
    """
    if gm.read is None:
        return {}
    held, v = _of_layers(body.sums, layer, _layers(k)), with_arrays(new.v, gm.codec_arrays)
    k = as_ranked(gm, dense(with_arrays(k, gm.codec_arrays)), new.pos)
    return _summarised(gm.read, k, held, new.traces, v, _fitted(gm))


def _layers(k: Array | Codes) -> int:
    return jax.tree.leaves(k)[0].shape[0]


def sums_with_new(
    gm: GroupMethod, body: Slots, new: Slots, moves: Bool[Array, "l B K S"], layer: int | Array
) -> dict[str, Array]:
    """Add the slots of `new` that move into a body to its per-head sums."""
    if not isinstance(gm.read, EstimatingRest):
        return body.sums
    stored, pos = with_arrays(new, gm.codec_arrays).keys(), jnp.where(moves, new.pos, -1)
    learnt = _of_layers(body.sums, layer, pos.shape[0])
    more = _totals(gm, as_ranked(gm, stored.k, pos), stored.v, pos, learnt, new.traces)
    return body.sums | {n: _added(body.sums[n], x, layer) for n, x in more.items()}


def sums_without(
    gm: GroupMethod, body: Slots, gone: Bool[Array, "B K S"], layer: int | Array
) -> dict[str, Array]:
    """Subtract the evicted slots of one layer from the per-head sums of a body."""
    if not isinstance(gm.read, EstimatingRest):
        return body.sums
    own, pos = with_arrays(body, gm.codec_arrays).layer(layer).keys(), jnp.where(gone, body.pos[layer], -1)
    held = [own.k, own.v, pos, {n: x[layer] for n, x in body.traces.items()}]
    if gm.at_once and gm.keep is not None and gm.keep.allocate.threshold is None:
        # At most one slot per KV head is evicted.
        one = jnp.argmax(gone, -1)[..., None]
        at = lambda x: one.reshape(*one.shape, *(1,) * (x.ndim - 3))  # noqa: E731
        held = jax.tree.map(lambda x: jnp.take_along_axis(x, at(x), axis=2), held)
    k, v, pos, traces = jax.tree.map(lambda x: x[None], held)
    less = _totals(gm, as_ranked(gm, k, pos), v, pos, _of_layers(body.sums, layer, 1), traces)
    return body.sums | {n: _added(body.sums[n], -x, layer) for n, x in less.items()}


def rewritten(gm: GroupMethod, body: Slots, layer: int | Array) -> Slots:
    """Compute a body's summaries and sums of one layer anew after a merge changed keys or values."""
    if gm.read is None or not (body.summary or body.sums):
        return body
    own = jax.tree.map(
        lambda x: x[layer][None], dataclasses.replace(with_arrays(body, gm.codec_arrays), near=None)
    )
    k = as_ranked(gm, dense(own.k), own.pos)
    held = own.sums | _totals(gm, k, own.keys().v, own.pos, own.sums, own.traces)
    put = lambda old, new: old.at[layer].set(new[0])  # noqa: E731
    fitted = jax.tree.map(lambda x: x[layer][None], _fitted(gm))
    summary = _summarised(gm.read, k, held, own.traces, own.v, fitted)
    return dataclasses.replace(
        body,
        summary={n: put(x, summary[n]) for n, x in body.summary.items()},
        sums={n: put(x, held[n]) for n, x in body.sums.items()},
    )


def _added(old: Array, more: Array, layer: int | Array) -> Array:
    """`old` with `more` added to its layers from `layer` on."""
    part = jax.lax.dynamic_slice_in_dim(old, layer, more.shape[0])
    return jax.lax.dynamic_update_slice_in_dim(old, part + more, layer, 0)


def summarised(
    gm: GroupMethod, group: GroupState, past: GroupState, pools: tuple[Pages, ...], idle: Bool[Array, "B"],
    asked: Any = None,
) -> tuple[GroupState, tuple[Pages, ...]]:  # fmt: skip
    """Store in a group, and the pools, at the end of a prefill, what its read needs beside slots.

    What a method learns from keys (`Learning`) is learnt here. Other summaries are made where slots are
    written, except those of pages, which are written once. past: the group before. Rows without new tokens
    (`idle`) keep what they learnt before. asked: the newest queries and their positions, if the read is
    `LearningFromQueries`.
    """
    read = gm.read
    if read is None or not group.bodies:
        return group, pools
    *pages, body = group.bodies
    assert isinstance(body, Slots)
    if not pages and not isinstance(read, Learning):
        return group, pools
    before = past.bodies[-1].sums if past.bodies and isinstance(past.bodies[-1], Slots) else {}
    lists = next((with_arrays(part, gm.codec_arrays) for part in pages if isinstance(part, Paged)), None)
    sums = _of_lists(gm, lists, body, pools, before, idle, asked)
    body = dataclasses.replace(body, sums=body.sums | sums)
    if isinstance(read, Learning):
        turned = lambda k, pos: as_ranked(gm, dense(k)[None], pos[None])[0]  # noqa: E731
        summary = over_layers(
            lambda k, pos, sums: read.summarise(turned(k, pos), sums),
            with_arrays(body.k, gm.codec_arrays),
            body.pos,
            sums,
        )
        body = dataclasses.replace(body, summary=summary)
    if lists is not None:
        pools = (*pools[: lists.pool], _in_pool(gm, lists, pools[lists.pool], sums), *pools[lists.pool + 1 :])
    return dataclasses.replace(group, bodies=(*pages, body)), pools


def _of_lists(
    gm: GroupMethod, lists: Paged | None, body: Slots, pools: tuple[Pages, ...], before: dict[str, Array],
    idle: Bool[Array, "B"], asked: Any,
) -> dict[str, Array]:  # fmt: skip
    """Return what a read stores per KV head, over keys and values of its pages and of the body after them."""
    read = gm.read
    if not isinstance(read, Learning | EstimatingRest):
        return {}

    def one(body: Slots, old: dict[str, Array], lists: Paged | None, asked: Any) -> dict[str, Array]:
        parts = [body.keys()] if lists is None else [gather_pages(lists, pools[lists.pool]), body.keys()]
        k, v, pos = (
            jnp.concatenate(x, axis=2) for x in zip(*((p.k, p.v, p.pos) for p in parts), strict=True)
        )
        new, k = {}, as_ranked(gm, k[None], pos[None])[0]
        if isinstance(read, Tracing):
            all_traces = [*(() if lists is None else (gather_traces(lists, pools[lists.pool]),)), body.traces]
            new = read.learn(k, pos, {n: jnp.concatenate([x[n] for x in all_traces], 2) for n in body.traces})
        elif isinstance(read, Learning):
            new = read.learn(k, pos, *(() if asked is None else (asked,)))
        new = new | _totals(gm, k, v, pos, new, {})
        stay = {n: idle.reshape(-1, *(1,) * (x.ndim - 1)) for n, x in new.items()}
        return {n: jnp.where(stay[n], old[n], x) if n in old else x for n, x in new.items()}

    traces = body.traces if isinstance(read, Tracing) else {}
    bare = dataclasses.replace(
        with_arrays(body, gm.codec_arrays), sums={}, summary={}, traces=traces, near=None
    )
    return over_layers(one, bare, before, lists, asked)


def _in_pool(gm: GroupMethod, lists: Paged, pool: Pages, sums: dict[str, Array]) -> Pages:
    """Put summaries of a group's pages into the pool; those of other groups are unchanged."""
    if _fitted(gm) is not None or gm.computed is not None:
        return _in_pool_by_layer(gm, lists, pool)
    k = as_ranked(gm, _in_pages(lists, pool, "k")[None, :, None], pool.pos[None, :, None])[0, :, 0]
    layers, rows, heads = lists.lengths.shape
    owner = pool.owner - lists.first_layer * rows * heads
    mine = (owner >= 0) & (owner < layers * rows * heads) & (pool.owner >= 0)
    held = jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:])[jnp.where(mine, owner, 0)], sums)

    def put(name: str, new: Array) -> Array:
        there = mine.reshape(-1, *(1,) * (new.ndim - 1))
        return jnp.where(there, new, pool.summary.get(name, jnp.zeros((), new.dtype)))

    v = _in_pages(lists, pool, "v") if isinstance(gm.read, Copying) else None
    new = _summarised(gm.read, k, held, pool.traces, v)
    return dataclasses.replace(pool, summary=pool.summary | {name: put(name, x) for name, x in new.items()})


def _in_pool_by_layer(gm: GroupMethod, lists: Paged, pool: Pages) -> Pages:
    """Compute `_in_pool` of summaries that are made layer by layer, with the layer's own arrays."""

    def one(lists: Paged, arrays: CodecArrays) -> dict[str, Array]:
        own = gm.replaced(codec_arrays=jax.tree.map(lambda x: x[None], arrays))
        held = gather_pages(lists, pool)
        assert held.k is not None and held.pos is not None and held.v is not None
        k = as_ranked(own, held.k[None], held.pos[None])
        found = _summarised(gm.read, k, {}, {}, held.v[None], _fitted(own))
        return {name: x[0] for name, x in found.items()}

    per_page = pool.page_tokens // gm.read.granule

    def put(name: str, new: Array) -> Array:
        shape = (pool.owner.shape[0], per_page, *new.shape[4:])
        old = pool.summary.get(name, jnp.zeros(shape, new.dtype))
        return old.at[_rows(lists, pool)].set(new.reshape(-1, *shape[1:]), mode="drop")

    new = over_layers(one, lists, dict(gm.codec_arrays))
    return dataclasses.replace(pool, summary=pool.summary | {name: put(name, x) for name, x in new.items()})


def _rows(lists: Paged, pool: Pages) -> Int[Array, "pages"]:
    """Where a pool has the pages of a group's lists, list by list; beyond its end after a list's last one."""
    page = jnp.arange(lists.most, dtype=jnp.int32)[None, None, None]
    # Pages after a head's end may belong to another head.
    own = page * pool.page_tokens < lists.lengths[..., None]
    return jnp.where(own, pool.table(lists), pool.owner.shape[0]).reshape(-1)


def _in_pages(lists: Paged, pool: Pages, name: str) -> Float[Array, "P page _"]:
    """Decode the keys ("k") or values ("v") of a pool.

    If codes are fitted to layers, those of one group, with its arrays.
    """
    if not lists.codec_arrays:
        return dense(getattr(pool, name))
    x = over_layers(lambda one: getattr(gather_pages(one, pool), name), lists)
    out = jnp.zeros((*pool.pos.shape, x.shape[-1]), x.dtype)
    return out.at[_rows(lists, pool)].set(x.reshape(-1, *out.shape[1:]), mode="drop")
