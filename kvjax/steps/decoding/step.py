"""One new token per row: append it, attend, evict, flush."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.capacity import free_slots
from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import flush_in_place, is_full
from kvjax.compress.sinks import behind_sinks, write_sinks
from kvjax.grammar.fitted import of_layer
from kvjax.grammar.keys import key_of
from kvjax.grammar.protocols import Inputs
from kvjax.mesh.on_mesh import OnMesh
from kvjax.mesh.per_device import each_device, specs_of
from kvjax.models.attending import published_by, rotary
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer, Memory, Projected, Step, Take
from kvjax.models.transformer import decode_layers, unembed
from kvjax.ops.base.dispatch import form
from kvjax.ops.decode.stacked_decode import LANES, on_lanes, stacked_append
from kvjax.place import by_layer
from kvjax.state.axes import lie_apart, pinned, pinned_to, specs_of_slots
from kvjax.state.cache import Cache, GroupState, Segment, Slots
from kvjax.state.code_forms import completed
from kvjax.state.codes import Codes, lent
from kvjax.state.write import after, first_empty, write_slots
from kvjax.steps.decoding.attend import attend_past, attend_turn, brought, met_by, persistent, selected
from kvjax.steps.decoding.evict_due import evict_due
from kvjax.steps.decoding.evict_now import Now, evict_hidden, evict_one, evict_shared
from kvjax.steps.decoding.losing_parts import tail_of
from kvjax.steps.decoding.past import past_of
from kvjax.steps.decoding.per_device import Split, bare, on_this_device, said_of_one, split_of
from kvjax.steps.decoding.prefetch import ahead_of, arrived, next_one, started, without
from kvjax.steps.decoding.update_traces import Asked, carried, remember, weights_of
from kvjax.steps.shared.fitted_arrays import lend, taught_groups
from kvjax.steps.shared.rotate import turned_queries, turns_over
from kvjax.steps.shared.run import Run, answered, held, repeated


def step_fn(
    run: Run,
    params: Params,
    cache: Cache,
    token: Int[Array, "B"] | Float[Array, "B D"],
    append: Bool[Array, "B"],
) -> tuple[Float[Array, "B V"], Cache]:
    """One token per row, or the vector in its place: append it, attend, evict.

    Rows with append=False store nothing: they ask `token` again at the position of their last token, over
    the cache as it is. A row without a free slot stores nothing, and its logits are NaN.
    """
    x, new = step_hidden(run, params, cache, token, append)
    return pinned_to(unembed(params, x, run.config), run.on_mesh, "batch", "vocab"), new


def step_hidden(
    run: Run,
    params: Params,
    cache: Cache,
    token: Int[Array, "B"] | Float[Array, "B D"],
    append: Bool[Array, "B"],
) -> tuple[Float[Array, "B D"], Cache]:
    """`step_fn` up to the last norm: the hidden state behind the layers, and the cache."""
    config = run.config
    gms = taught_groups(run.groups(params), params)
    owner = {gm.first: gm for gm in gms}
    full = append & (free_slots(gms, cache) < 1)
    append = append & ~full
    at = jnp.where(append, cache.next, cache.next - 1)
    length = at + 1
    ids = token[:, None] if token.ndim == 1 else None

    def attend(layer: Layer, x: Projected, state: GroupState):
        gm = gms[layer.group]
        q = x.q
        if x.k is not None:
            k = x.k if run.unrotated else rotary(layer, x.k, at[:, None], length)
            v = None if x.v is None else repeated(run, gm.first, x.v)
            inputs = _inputs(params, layer, x, at, length, append)._replace(tokens=ids)
            traces = {key_of(t): t.start(inputs, tail_of(state).kv_heads) for t in gm.traces}
            where = jnp.where(append, at, -1)
            k = repeated(run, gm.first, k)
            state = _append(run, gm, layer, state, k, v, where, traces)
            if gm.hiding is not None and gm.at_once:
                state = evict_hidden(run, gm, layer, state, inputs, append)
        past = arrived(past_of(owner, gm, layer, completed(cache.groups, layer.group, state)))
        state = next_one(state, layer.index)
        turn, *others = turns_over(run, at, past.parts, past.index, cache.pools)
        asking = _for_all_slots(run, past.parts, turned_queries(layer, q, turn, length))
        past, x = past._replace(turn=turn), x._replace(q=asking)
        gone = answered(gm, layer, state, x.q, params)
        past, taken, picked = persistent(run, past, layer, x.q, length)
        past, state, found = brought(run, past, state, taken or selected(run, past, x.q, length))
        gone = [*gone, *(attend_turn(run, past, layer, x, cache.pools, at, turn) for turn in others)]
        out, received, scores = attend_past(run, past, layer, x, cache.pools, at, found, gone)
        received = met_by(gm, past, x.q, at, cache.pools, received, layer.number)
        received = jax.tree.map(lambda m: jnp.where(append[:, None, None], m, 0.0), received)
        left = published_by(layer, state, None, None, scores) | picked
        if "slots" in layer.publishes or x.k is None:
            return out, state, left | {"collected": Asked(received, x.q, {})}
        inputs = _inputs(params, layer, x, at, length, append)._replace(q_raw=q, tokens=ids)
        asked = Asked(() if gm.at_once else received, None, carried(gm, layer, state, inputs))
        if gm.at_once and gm.hiding is None:
            weights = jax.tree.map(lambda w: w[layer.index], weights_of(gm, params["layers"][layer.group]))
            # What moves into a second tier is written where this layer's attention has read.
            at_last = length if gm.keep is None or gm.keep.lower is None else after(length, out)
            now = Now(received, x.q, asked.rows, at_last, append, weights, inputs.fitted)
            state, rows, lost = evict_one(run, gm, layer, state, now)
            out, asked = _broken(out, lost), asked._replace(rows=asked.rows | rows)
        return out, state, left | ({"collected": asked} if any(asked) else {})

    def recur(layer: Layer, step: Step, state: GroupState):
        past = state.state
        assert past is not None
        out, new = step(past.layer_in_place(layer.index, layer.mixer.in_place), append[:, None])
        return out, GroupState(state=past.replaced(layer.index, new)), {}

    memory = Memory(
        at[:, None], attend, recur, held, implementation=run.without_gpu, takes=_picks_taken(gms),
        ahead=ahead_of(cache.groups), on_mesh=run.on_mesh,
    )  # fmt: skip
    held_now = started(lend(cache.groups, gms))
    x, groups, seen, *_ = decode_layers(params, token[:, None], config, memory, held_now)
    groups = tuple(map(without, groups))
    groups, pools = remember(run, gms, groups, cache.pools, seen)
    groups, lost = evict_shared(run, gms, groups, seen, length, append)
    groups, late = evict_due(run, gms, groups, params, length, append)
    groups = _flushed(gms, lent(groups, ()), x, run.on_mesh)
    new = dataclasses.replace(cache, groups=groups, next=jnp.where(append, length, cache.next), pools=pools)
    return _broken(x[:, 0], lost | late | full), pinned(new, run.on_mesh)


def _picks_taken(gms: tuple[GroupMethod, ...]) -> dict[int, dict[str, Take]]:
    """Which layers take up the picks of which, by the first layer of a group."""
    found = {gm.first: gm.picker for gm in gms if gm.picker is not None and not gm.picks}
    return {first: {"picks": Take("picks", picker)} for first, picker in found.items()}


def _broken(x: Float[Array, "B *_"], lost: Bool[Array, "B"]) -> Float[Array, "B *_"]:
    """x, but NaN in rows without an empty slot, or whose slots could not be ranked: a step cannot raise."""
    return jnp.where(lost.reshape(-1, *(1,) * (x.ndim - 1)), jnp.asarray(jnp.nan, x.dtype), x)


def _for_all_slots(run: Run, parts: tuple[Segment, ...], q: Float[Array, "B N 1 H"]) -> Array:
    """Queries where slots can meet them: of all heads, where slots are split in place of heads.

    Left to itself the compiler might send slots to where the queries of their heads are.
    """
    on = run.on_mesh
    if on is None or not any(lie_apart(part, on) for part in parts):
        return q
    heads = {*on.rules.mesh_axes("heads")} & {*on.rules.mesh_axes("slots")}
    return pinned_to(q, on, "batch", None if heads else "heads", None, None)


def _inputs(
    params: Params, layer: Layer, x: Projected, at: Int[Array, "B"], length: Int[Array, "B"], append: Array
) -> Inputs:
    """What observations look at. Where layers read others' slots, the keys are not theirs."""
    raw, pos = x.q if x.k is None else x.k, jnp.where(append, at, -1)[:, None]
    k = raw if x.k is None else rotary(layer, x.k, at[:, None], length)
    taught = of_layer(params, layer.number)
    return Inputs(x.q, x.q, raw, x.hidden, pos, length, taught, k=k, v=x.v)


def _append(
    run: Run, gm: GroupMethod, layer: Layer, state: GroupState, k: Array, v: Array | None,
    pos: Int[Array, "B"], traces: dict[str, Float[Array, "B K 1"]],
) -> GroupState:  # fmt: skip
    if state.sinks is not None:
        at = jnp.broadcast_to(pos[None, :, None, None], (1, *k.shape[:2], 1))
        first = {name: x[None] for name, x in traces.items()}
        state = write_sinks(gm, state, k[None], None if v is None else v[None], at, first, layer.index)
    pos, tail = behind_sinks(gm, state, pos), tail_of(state)
    slot = jnp.where(pos[:, None] >= 0, first_empty(tail.pos[layer.index]), -1)
    spread = jnp.broadcast_to(pos[None, :, None, None], (1, *slot.shape, 1))
    write = partial(
        write_slots, slot=slot[None, ..., None], pos=spread, layer=layer.index,
        traces={name: x[None] for name, x in traces.items()},
    )  # fmt: skip
    split = split_of(run.on_mesh, tail)
    if tail.far:
        return state.with_tail(_append_far(run, tail, write, k, v, slot, layer.index))
    chosen = said_of_one(split, partial(_form_of_append, run), bare(tail), k)
    if chosen == "reference":
        return state.with_tail(write(tail, k=k[None], v=None if v is None else v[None]))
    new_k, new_v = _appended(split, chosen, tail, k, v, slot, layer.index)
    return state.with_tail(write(dataclasses.replace(tail, k=new_k, v=new_v), k=None, v=None))


def _append_far(
    run: Run, tail: Slots, write: Callable[..., Slots], k: Array, v: Array | None, slot: Int[Array, "B K"],
    index: int | Array,
) -> Slots:  # fmt: skip
    """A tail in host memory with a token more, which the layer on the device has, too."""
    one = write(by_layer.of_layer(tail, index), k=k[None], v=None if v is None else v[None], layer=0)
    return by_layer.stored(write(tail, k=None, v=None), one, slot, index, run.on_mesh)


def _appended(
    split: Split | None, implementation: str, tail: Slots, k: Array, v: Array | None,
    slot: Int[Array, "B K"], index: int | Array,
) -> tuple[Array, Array | None]:  # fmt: skip
    """The keys and values of all layers, with a row more in every list of one, on the devices they lie on."""

    def put(tail: Slots, k: Array, v: Array | None, slot: Array, index: Array) -> tuple[Array, Array | None]:
        assert not isinstance(tail.k, Codes) and not isinstance(tail.v, Codes)
        one = None if v is None else v[:, :, 0]
        mine = on_this_device(split, tail.capacity, slot)
        return stacked_append(tail.k, tail.v, k[:, :, 0], one, mine, index, implementation=implementation)

    slot = jnp.where(slot < tail.capacity, slot, -1)
    args = bare(tail), k, v, slot, jnp.asarray(index)
    if split is None:
        return put(*args)
    specs = [*split.specs(*args[:1], k)[:1], *split.of_lists(*args[1:])]
    return each_device(split.on, put, specs, (specs[0].k, specs[0].v))(*args)


def _form_of_append(run: Run, tail: Slots, new: Array) -> str:
    """XLA writes rows where they lie; slots that lie on the lanes it would lay out anew."""
    caches = [x for x in (tail.k, tail.v) if x is not None and not isinstance(x, Codes)]
    if isinstance(tail.k, Codes) or isinstance(tail.v, Codes) or not any(map(on_lanes, caches)):
        return "reference"
    why = "" if tail.capacity % LANES == 0 else f"{tail.capacity} slots, expected a multiple of {LANES}"
    return form("append", run.without_gpu, tail, new, tpu=why)


def _flushed(
    gms: tuple[GroupMethod, ...], groups: tuple[GroupState, ...], x: Float[Array, "B T D"],
    on: OnMesh | None,
) -> tuple[GroupState, ...]:  # fmt: skip
    """Where any tail is full, all give what they can to the bodies before them. x: what the layers made.

    One loop of one turn or none for all groups: XLA for GPUs copies all that a conditional passes through,
    and waits for the host at every loop whose turns are data. On a mesh every device has a loop of its own,
    unless it has but some slots of a list, or what was fitted for all lists.
    """
    split = {i: _body_and_tail(group) for i, group in enumerate(groups) if gms[i].split}
    if not split:
        return groups

    def flushed(split: dict[int, tuple[Slots, Slots]], x: Array) -> dict[int, tuple[Slots, Slots]]:
        full = [is_full(gms[i], tail) for i, (_, tail) in split.items()]
        turns = after(jnp.stack(full).any().astype(jnp.int32), x)
        return jax.lax.fori_loop(0, turns, flush, split)

    def flush(_: Any, split: dict[int, tuple[Slots, Slots]]) -> dict[int, tuple[Slots, Slots]]:
        return {i: flush_in_place(gms[i], *parts) for i, parts in split.items()}

    on = on and on.with_whole_layers
    taught = any(jax.tree.leaves(gms[i].taught) for i in split)
    if on is not None and (taught or any(lie_apart(s, on) for parts in split.values() for s in parts)):
        on = None
    specs = None if on is None else {i: tuple(specs_of_slots(s, on) for s in split[i]) for i in split}
    split = each_device(on, flushed, (specs, specs_of(on, ("batch",), x)), specs)(split, x)
    return tuple(
        dataclasses.replace(group, bodies=split[i][:1], tail=split[i][1]) if i in split else group
        for i, group in enumerate(groups)
    )


def _body_and_tail(group: GroupState) -> tuple[Slots, Slots]:
    (body,) = group.bodies
    assert isinstance(body, Slots)
    return body, tail_of(group)


step = jax.jit(step_fn, static_argnames=("run",), donate_argnames=("cache",))
step_keeping = jax.jit(step_fn, static_argnames=("run",))
