"""Attention of one query over a layer's past: segments that kernels read in place, and the others jointly."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.grammar.calls import met, shaped
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import AttentionSpec
from kvjax.grammar.phase import PairRotation
from kvjax.grammar.read_kinds import EstimatingRest, Placing
from kvjax.models.attending import attend_at_once, in_chunks, in_lists, rotated
from kvjax.models.mixer import AttentionLogits, Layer, Projected
from kvjax.models.picking import all_of, marked
from kvjax.ops.attention.in_common import for_rows, row_by_row, side_by_side
from kvjax.ops.attention.union import Keys, merge
from kvjax.ops.base.dispatch import kernels_may_run
from kvjax.place.paged import attend_pages
from kvjax.state.cache import Paged, Pages, Slots
from kvjax.state.code_forms import BasisOperands, factors_of, meet
from kvjax.state.page_gather import gather_pages, page_positions
from kvjax.state.picked_pages import positions, spread, visited, visited_of_lists
from kvjax.steps.decoding.at_layer import AtLayer, Part, Received
from kvjax.steps.decoding.computed_keys import attend_computed, in_strips
from kvjax.steps.decoding.dispatch import (
    form_of,
    pages_apart,
    picking,
    rotation_in_kernel,
    why_jointly,
)
from kvjax.steps.decoding.in_place import KernelOperands, attend_picked, attend_slots, biases, by_list
from kvjax.steps.decoding.past import FoundPicks, Past, PickedPages
from kvjax.steps.decoding.per_device import attended_on_each, on_all, split_of
from kvjax.steps.decoding.picks import as_met, picked_from
from kvjax.steps.decoding.rotate_pages import attend_unrotated_pages
from kvjax.steps.shared.rotate import rope_of_keys, rotated_keys, sharpened, weighed
from kvjax.steps.shared.run import Run

# Factors on the keys and on the values of a layer's slots.
Factors = tuple[Array | None, Array | None]


def attend(here: AtLayer) -> AtLayer:
    """Attend to the parts of the past, and merge what was attended before.

    The logits are those of the parts that are attended jointly: of all parts, if another layer uses them.
    """
    x = _picking_if_more(here, here.x._replace(q=here.q))
    parts, received, logits = _parts(here, x)
    out = parts[0][0] if len(parts) == 1 else merge(parts)[0]
    out = out if x.expand is None or x.expand.outputs is None else x.expand.outputs(out)
    return here._replace(out=out, received=received, logits=logits)


def attend_other_rotation(here: AtLayer, rotation: PairRotation) -> Part:
    """(out, lse) of one query over the slots that it attends to in a further rotation, for `attend`."""
    x = _picking_if_more(here, here.x._replace(q=sharpened(here.q, rotation), extra=None))
    parts, *_ = _parts(here._replace(past=here.past._replace(rotation=rotation), found=None, parts=()), x)
    out, lse = parts[0] if len(parts) == 1 else merge(parts)
    return out, weighed(lse, rotation)


def _picking_if_more(here: AtLayer, x: Projected) -> Projected:
    """Without picking if all slots fit into what a query picks; so its kernels may run."""
    if x.picking is None:
        return x
    past, pools = here.past, here.pools
    sizes = [s.most * pools[s.pool].page_tokens if isinstance(s, Paged) else s.capacity for s in past.parts]
    if sum(sizes) > x.picking.top:
        return x
    places = [_positions(s, past, pools) for s in past.parts]
    x.picking.leave(all_of(places, here.token.at.shape[0]))
    return x._replace(picking=None)


def _positions(segment: Slots | Paged, past: Past, pools: tuple[Pages, ...]) -> Int[Array, "B K S"]:
    if isinstance(segment, Slots):
        return segment.pos[past.index]
    return page_positions(segment.layer(past.index), pools[segment.pool])


def _parts(here: AtLayer, x: Projected) -> tuple[list[Part], tuple[Received, ...], AttentionLogits]:
    """Compute the parts of the union that a query attends to, each by itself or jointly with others."""
    run, stored, layer, at, found = here.token.run, here.past, here.layer, here.token.at, here.found
    pools, more, rows = here.pools, here.parts, here.token.at.shape[0]
    pos, wanted, jointly = at[:, None], stored.gm.masses, why_jointly(stored, layer, x)
    # Keys and values of slots that queries cannot attend to as they are.
    unreadable = x.expand if x.expand is not None and x.expand.outputs is None else None
    resting = stored.gm.read if isinstance(stored.gm.read, EstimatingRest) else None
    sets: list[Keys] = []
    parts: list[Part] = []
    received: tuple[Received, ...] = ()
    bases = [(BasisOperands(x.q, x.q, None, lambda out: out, False), (None, None))] * len(stored.parts)
    if not (wanted or jointly or run.unrotated):
        past, bases = _in_their_bases(stored, x)
        here = here._replace(past=past)
    past = here.past
    for i, base in enumerate(bases):
        own = _apart(here, x, i, base, jointly)
        if own is None:
            sets.append(_read(here, i, rows))
            continue
        out, lse, mass = own
        # For a single query, the decayed sum equals the sum.
        received = () if mass is None else ({key_of(o): mass for o in wanted},)
        parts.append((base[0].back(row_by_row(out, rows)), row_by_row(lse, rows)))
    sets, pos = in_chunks(layer, sets, pos) if layer.mixer.chunked else (sets, pos)
    if x.picking is not None:
        sets = marked(x.picking, x.q, [for_rows(s, at.shape[0]) for s in sets], pos, layer.window)
    q, products = x.q, None
    if unreadable is not None and not wanted and in_strips(run, layer, x):
        q, parts, sets = unreadable.queries(q), [*attend_computed(layer, x, sets, pos), *parts], []
    elif unreadable is not None:
        products = unreadable.products if x.extra is None else None
        q, sets = unreadable.queries(q), sets if products is not None else unreadable.sets(sets)
    if resting is not None and x.extra is not None:
        # `read.rest` gets the lse of slots that were read; extra keys are no slots, and are attended apart.
        more = [*more, attend_at_once(layer, x, q, [x.extra], pos)[:2]]
        x = x._replace(extra=None)
    sets, scores = sets if x.extra is None else [x.extra, *sets], ()
    if sets:
        kinds = tuple(o.reduction for o in wanted)
        out, lse, masses, scores = attend_at_once(layer, x, q, sets, pos, mass=kinds, products=products)
        parts = [(out, lse), *parts]
        if wanted:
            each = [in_lists(kinds, m, past.tail.kv_heads) for m in masses[x.extra is not None :]]
            if found is not None and past.gm.read is not None:
                for i, picks in enumerate(found.parts):
                    each[i] = tuple(_at_slots(past, i, picks, pools, m) for m in each[i])
            received = tuple({key_of(o): m for o, m in zip(wanted, one, strict=True)} for one in each)
    if resting is not None:
        assert found is not None
        parts.append(_rest_of(run, stored, layer, q, resting, found, pools, parts))
    return [*parts, *more], received, scores


def _apart(
    here: AtLayer, x: Projected, i: int, base: tuple[BasisOperands, Factors], jointly: str
) -> tuple[Array, Array, Array | None] | None:
    """Attend to segment `i` alone: (out, lse, mass if needed); None if it is attended jointly."""
    run, past, layer, at = here.token.run, here.past, here.layer, here.token.at
    (met, sizes), segment = base, past.parts[i]
    copies = at.shape[0] // segment.rows
    mine, when = side_by_side(met.q, segment.rows), at.reshape(segment.rows, copies)
    if isinstance(segment, Paged):
        pool = here.pools[segment.pool]
        if picking(past, i) is None and pages_apart(run, past, layer, x, i, pool, jointly):
            return *_attend_pages(run, past, layer, i, segment, pool, mine, when), None
    elif kernels_may_run(run.implementation):
        sized = sizes[0] is not None, sizes[1] is not None
        if (chosen := form_of(run, past, layer, x, i, mine, jointly, sized)) != "reference":
            asked = mine, when, at[:, None]
            return _in_kernel(run, past, layer, x, i, segment, chosen, asked, sizes, here.found)
    if jointly or run.unrotated or (copies == 1 and not met.turned and sizes == (None, None)):
        return None
    keys = _read(here, i, segment.rows)._replace(sizes=sizes)
    return *attend_at_once(layer, x, mine, [keys], when)[:2], None


def _attend_pages(
    run: Run, past: Past, layer: Layer, i: int, pages: Paged, pool: Pages, q: Array, pos: Int[Array, "B T"]
) -> Part:
    how: dict[str, Any] = dict(scale=layer.scale, softcap=run.config.attention_softcap)
    how |= dict(implementation=run.implementation)
    if (rotation := rotation_in_kernel(past, layer, i)) is not None:
        return attend_unrotated_pages(run.on_mesh, q, pages.layer(past.index), pool, rotation, **how)
    call = partial(attend_pages, **how)
    # A pool is replicated, and the owner of a page is data, so the queries are replicated, too.
    return on_all(run.on_mesh, call, q, pages.layer(past.index), jnp.asarray(past.index), pool, pos)


def _in_kernel(
    run: Run, past: Past, layer: Layer, x: Projected, i: int, slots: Slots, implementation: str,
    asked: tuple[Array, Array, Array], sizes: Factors, found: FoundPicks | None,
) -> tuple[Array, Array, Array | None]:  # fmt: skip
    """Attend to segment `i` in a kernel. asked: queries and positions per KV head; positions per row."""
    q, when, pos = asked
    split = split_of(run.on_mesh, slots, bool(past.gm.masses))
    if (read := picking(past, i)) is not None:
        assert found is not None
        call = partial(attend_picked, run, layer, read, implementation)
        picks = found.parts[i]
        picks = picks._replace(bias=by_list(picks.bias, slots.kv_heads))
        return attended_on_each(split, call, slots, x.q, pos, past.index, picks)
    call = partial(attend_slots, run, layer, bool(past.gm.masses), implementation)
    rotation = rotation_in_kernel(past, layer, i)
    beside = KernelOperands(*sizes, None if rotation is None else rotation.phase)
    return attended_on_each(split, call, slots, q, when, past.index, beside)


def _in_their_bases(past: Past, x: Projected) -> tuple[Past, list[tuple[BasisOperands, Factors]]]:
    """Map segments that are attended separately to the bases of their codecs, and queries to match.

    Also returns the factors on the keys and values of every slot, for codes that are such products. Pages are
    rotated where they are attended. Segments that are attended jointly with others, or whose mass is needed,
    are rotated back instead.
    """
    bases, parts = [], []
    for i, segment in enumerate(past.parts):
        met = BasisOperands(x.q, x.q, None, lambda out: out, False)
        sizes: Factors = (None, None)
        if isinstance(segment, Slots):
            k, v = segment.k, segment.v
            # Values that are channels of the keys need whole keys, and picked slots leave out the factors of
            # the others.
            if v is not None and picking(past, i) is None:
                (k, of_keys), (v, of_values) = factors_of(k), factors_of(v)
                sizes = (_of_layer(of_keys, past.index), _of_layer(of_values, past.index))
            met = meet(x.q, k, v, past.index)
            segment = dataclasses.replace(segment, k=met.k, v=met.v)
        parts.append(segment)
        bases.append((met, sizes))
    return past._replace(parts=tuple(parts)), bases


def _of_layer(x: Float[Array, "Lg B K S"] | None, index: int | Array) -> Float[Array, "B K S"] | None:
    return None if x is None else x[index]


def _read(here: AtLayer, i: int, rows: int) -> Keys:
    """One layer of segment `i` as plain keys and values, or only the pages that a method picks.

    rows: as many as the segment has, so that copies of a row read it together, or one for every copy.
    """
    run, past, layer, at, found = here.token.run, here.past, here.layer, here.token.at, here.found
    pools = here.pools
    segment = past.parts[i]
    if (read := picking(past, i)) is not None:
        assert found is not None
        pages, counts, bias = found.parts[i]
        if isinstance(segment, Paged):
            lists, pool = segment.layer(past.index), pools[segment.pool]
            keys = visited_of_lists(lists, pool, read.granule, pages, counts)
        else:
            keys = visited(segment, past.index, read.granule, pages, counts).keys()
        keys = keys._replace(bias=biases(keys.bias, bias))
    elif isinstance(segment, Paged):
        keys = for_rows(gather_pages(segment.layer(past.index), pools[segment.pool]), rows)
    else:
        keys = for_rows(segment.layer(past.index).keys(), rows)
    if past.rotation is not None and read is not None and past.rotation.keys:
        # Picked slots are gathered in another order, so their keys are rotated by their own positions.
        assert keys.pos is not None and run.phase.steady
        place = jnp.maximum(keys.pos, 0)
        if isinstance(read, Placing):
            assert found is not None
            place = read.places(keys.pos, _end_of_picks(past, i, found, at), at[:, None, None])
        keys = keys._replace(k=rotated(rope_of_keys(layer), keys.k, place, at + 1))
    elif past.rotation is not None and past.rotation.keys:
        keys = rotated_keys(rope_of_keys(layer), keys, past.rotation, i, at + 1)
    if past.values is not None:
        keys = keys._replace(v=for_rows(past.values[i].keys(), rows).v)
    if past.above and keys.pos is not None:
        keys = keys._replace(pos=jnp.where(keys.pos >= 0, keys.pos + 1, -1))
    return keys


def _end_of_picks(past: Past, i: int, found: FoundPicks, at: Int[Array, "B"]) -> Int[Array, "B K 1"]:
    """Find the position before which the picked slots of segment `i` end, if slots read leave no gap.

    It is that of the oldest slot of the tail, less the number of slots that are picked from later segments.
    """
    tail, page = past.tail.pos[past.index], past.gm.read.granule
    end = jnp.where(tail >= 0, tail, at[:, None, None] + 1).min(-1, keepdims=True)
    for picks, part in zip(found.parts[i + 1 :], past.parts[i + 1 :], strict=False):
        assert isinstance(part, Slots)
        held = positions(part, past.index, page, picks.pages, picks.counts) >= 0
        end = end - held.sum(-1, keepdims=True, dtype=jnp.int32)
    return end


def _at_slots(
    past: Past, i: int, picks: PickedPages, pools: tuple[Pages, ...], received: Float[Array, "B K P"]
) -> Float[Array, "B K S"]:
    """Spread the attention of segment `i`'s picked slots to all its slots, with 0 for those not read."""
    part, page = past.parts[i], past.gm.read.granule
    slots = part.most * pools[part.pool].page_tokens if isinstance(part, Paged) else part.capacity
    return spread(received, page, picks.pages, picks.counts, slots)


def _rest_of(
    run: Run, past: Past, layer: Layer, q: Array, read: EstimatingRest, found: FoundPicks,
    pools: tuple[Pages, ...], parts: Sequence[Part],
) -> Part:  # fmt: skip
    """Estimate attention, by the method, over the slots that it did not pick, given the attended parts."""
    lse, picks = merge(parts)[1], found.whole
    if found.far is not None:
        # Copies of what was picked have no sums over the whole body.
        past, picks = past._replace(parts=(found.far[0], *past.parts[1:])), found.far[1]
    body, index = picked_from(past, pools)
    if isinstance(past.parts[0], Slots):
        tail, _ = as_met(past, past.tail)
    else:
        tail, _ = as_met(past._replace(index=0), jax.tree.map(lambda x: x[past.index][None], past.tail))
    attention = AttentionSpec(layer.scale, run.config.attention_softcap, layer.rope)
    q = q if past.gm.computed is None else past.gm.computed.queries(q, body.kv_heads)
    out, left = read.rest(q, body, tail, index, (picks.pages, picks.counts), lse, attention)
    shaped(read, "the rest", out, "[B, N, T, V]", parts[0][0].shape)
    shaped(read, "the log of its weight", left, "[B, N, T]", lse.shape)
    return out, left


def met_by(
    gm: GroupMethod, past: Past, q: Float[Array, "B N 1 H"], at: Int[Array, "B"], pools: tuple[Pages, ...],
    received: tuple[Received, ...], layer: Layer,
) -> tuple[Received, ...]:  # fmt: skip
    """Compute the attention that slots received, and the numbers that traces compute from query and slots.

    Slots from which a read picks are older than the newest tokens that it remembers, and add nothing to that.
    """
    if not gm.slot_observations:
        return received
    out, of_keep = [], {o for trace in gm.traces_of_keep for o in trace.needs}
    for i, (segment, own) in enumerate(zip(past.parts, received or ({},) * len(past.parts), strict=True)):
        if (pools[segment.pool] if isinstance(segment, Paged) else segment).traces:
            one = segment.layer(past.index)
            keys = gather_pages(one, pools[one.pool]) if isinstance(one, Paged) else one.keys()
            if past.rotation is not None and past.rotation.keys:
                keys = rotated_keys(rope_of_keys(layer), keys, past.rotation, i, at + 1)
            assert keys.pos is not None
            seen = q, at[:, None], keys.k, keys.pos, layer.number
            none = jnp.zeros(keys.pos.shape, jnp.float32)
            done = {o for o in gm.slot_observations if picking(past, i) is not None and o not in of_keep}
            own = own | {key_of(o): none if o in done else met(o, *seen) for o in gm.slot_observations}
        out.append(own)
    return tuple(out)
