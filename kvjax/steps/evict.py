"""What a step changes beside its new token: slots that leave, and what a method remembers of all others."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.cache import Codes, GroupState, Pages, Slots, encode
from kvjax.choose import grown, judged
from kvjax.fitted import of_layer
from kvjax.grammar import Keep
from kvjax.group import GroupMethod
from kvjax.keep.observe import Mass, Queries
from kvjax.keep.select import top
from kvjax.models.exchange import published
from kvjax.models.layers import Params
from kvjax.models.mixer import Layer
from kvjax.models.mixers.attention import mixer_of
from kvjax.ops.attention.union import Keys
from kvjax.protocols import Inputs, Judging, Seen, View
from kvjax.segments import remember_in_pages
from kvjax.steps.attend import Received
from kvjax.steps.run import Run
from kvjax.words import merged, protected, scored, written
from kvjax.writing import first_empty, write_slots

NEWEST = repr(Queries(1))


class Asked(NamedTuple):
    """What a layer leaves for the end of the step.

    received: what the slots of each part received of the query. q: the rotated query, where several layers
    read the slots. rows: what rows carry behind this token.
    """

    received: tuple[Received, ...]
    q: Float[Array, "B N 1 H"] | None
    rows: dict[str, Any]


class Now(NamedTuple):
    """What decides which slot leaves in a token's own step: what slots received, its query, carried rows."""

    received: tuple[Received, ...]
    q: Float[Array, "B N 1 H"]
    rows: dict[str, Any]
    length: Int[Array, "B"]
    append: Bool[Array, "B"]
    weights: dict[str, Array] | None = None
    fitted: dict[str, dict[str, Array]] = {}  # noqa: RUF012 (never written to)


def weights_of(gm: GroupMethod, layers: dict[str, Array]) -> dict[str, Array] | None:
    """The matrices of a group's layers where its score asks for them."""
    score = None if gm.keep is None else gm.keep.score
    return layers if getattr(score, "weights", False) else None


def carried(gm: GroupMethod, layer: Layer, state: GroupState, inputs: Inputs) -> dict[str, Any]:
    """What the rows of a layer carry behind a token."""
    mine = jax.tree.map(lambda x: x[layer.index], state.rows)
    by_merge = {repr(gm.merge): mine[repr(gm.merge)]} if gm.merge is not None and gm.at_once else {}
    return by_merge | {repr(o): o.carry(mine[repr(o)], inputs) for o in gm.carried}


def remember(
    run: Run,
    gms: tuple[GroupMethod, ...],
    groups: tuple[GroupState, ...],
    pools: tuple[Pages, ...],
    seen: tuple[Any, ...],
) -> tuple[tuple[GroupState, ...], tuple[Pages, ...]]:
    """Traces and rows of all groups behind a token; where a slot leaves at once, its layer has grown them."""
    out = list(groups)
    for i, (gm, asked) in enumerate(zip(gms, seen, strict=True)):
        if not isinstance(asked, Asked) or gm.kind != "slots":
            continue
        group = dataclasses.replace(groups[i], rows=groups[i].rows | asked.rows)
        if asked.received and gm.traces and not gm.at_once:
            received = _in_all(run, gms, seen, i)
            pools = remember_in_pages(gm, group, pools, received)
            parts = [
                dataclasses.replace(s, traces=grown(gm.traces, s.traces, got)) if isinstance(s, Slots) else s
                for s, got in zip(group.parts, received, strict=True)
            ]
            tail = parts[-1]
            assert isinstance(tail, Slots)
            group = dataclasses.replace(group, bodies=tuple(parts[:-1]), tail=tail)
        out[i] = group
    return tuple(out), pools


def _in_all(run: Run, gms: tuple[GroupMethod, ...], seen: tuple[Any, ...], i: int) -> tuple[Received, ...]:
    """What the slots of group `i` received in its own layers and in those that read them."""
    gm, received = gms[i], seen[i].received
    for j, reader in enumerate(gms):
        if reader.kind == "reads" and mixer_of(run.config, reader.first).source_of("slots") == gm.first:
            pairs = zip(received, seen[j].received, strict=True)
            received = tuple(
                {
                    repr(o): o.join(mine[repr(o)], o.reduction.over(theirs[repr(o)], 0)[None])
                    for o in gm.masses
                }
                for mine, theirs in pairs
            )
    return received


def evict_shared(
    run: Run,
    gms: tuple[GroupMethod, ...],
    groups: tuple[GroupState, ...],
    seen: tuple[Any, ...],
    length: Int[Array, "B"],
    append: Bool[Array, "B"],
) -> tuple[tuple[GroupState, ...], Bool[Array, "B"]]:
    """Slots that other layers read leave behind the last of them, by what they received in all.

    Also the rows in which a live slot's score was not a number (NaN).
    """
    out, lost = list(groups), jnp.zeros(length.shape, bool)
    for i, gm in enumerate(gms):
        if "slots" not in published(run.config).get(gm.first, ()) or not gm.at_once:
            continue
        received = _in_all(run, gms, seen, i)
        mine, q = jax.tree.map(lambda x: x[0], (received, seen[i].q))
        mixer = mixer_of(run.config, gm.first)
        layer = Layer(
            i, 0, gm.first, None, mixer.rope(run.config, gm.first), mixer, run.config, length[:, None] - 1
        )
        rows = jax.tree.map(lambda x: x[0], groups[i].rows)
        changed, rows, bad = evict_one(run, gm, layer, groups[i], Now(mine, q, rows, length, append))
        rows = groups[i].rows | jax.tree.map(lambda x: x[None], rows)
        out[i], lost = dataclasses.replace(changed, rows=rows), lost | bad
    return tuple(out), lost


def evict_one(
    run: Run, gm: GroupMethod, layer: Layer, group: GroupState, now: Now
) -> tuple[GroupState, dict[str, Any], Bool[Array, "B"]]:
    """Empties the slot of the lowest score where a list holds more than its budget.

    It is merged into others, or moves to the second tier, where the keep says so. Also what rows carry behind
    it, of those things that an eviction changes, and the rows in which a live slot's score was not a number
    (NaN), which cannot be ranked.
    """
    keep, q, length, append = gm.keep, now.q, now.length, now.append
    assert keep is not None and keep.score is not None
    slots, received = _tail(group), now.received[-1] if now.received else {}
    one, n = slots.layer(layer.index), keep.budget.count(length)
    keys, traces = one.keys(), grown(gm.traces, one.traces, received)
    view = View(keys.k, keys.v, one.pos, one.bias, traces, received)
    observed = {repr(o): o.read(now.rows[repr(o)]) for o in gm.carried} | {NEWEST: (q, length[:, None] - 1)}
    mass = received.get(repr(Mass("sum")))
    seen = Seen(
        observed | received,
        mass,
        length,
        n,
        layer.number,
        run.attention_spec(gm.first),
        q,
        now.weights,
        now.fitted,
    )
    score = _in_order(keep.score, view, seen).astype(jnp.float32)
    lost = _not_numbers(score, one.pos) & append
    for pattern in keep.protect:
        score = jnp.where(protected(pattern, one.pos, length, n), jnp.inf, score)
    score = jnp.where(one.pos < 0, jnp.inf, score)
    gone = _leaving(keep, score, one.pos, n) & append[:, None, None]
    rows: dict[str, Any] = {}
    if keep.merge is not None:
        victim = jnp.where(gone.any(-1), jnp.argmax(gone, -1), one.capacity).astype(jnp.int32)
        stay = (one.pos >= 0) & ~gone
        new, rows = merged(keep.merge, view, stay, victim[..., None], seen, now.rows)
        changed = {name: getattr(new, name) for name in written(keep.merge)}
        slots = _replace_layer(slots, layer.index, **changed)
    if keep.lower is not None:
        group = _demoted(gm, layer.index, group, view, gone, now.received)
    traces = {name: jnp.where(gone, 0.0, x) for name, x in traces.items()}
    pos = slots.pos.at[layer.index].set(jnp.where(gone, -1, one.pos))
    new = {name: slots.traces[name].at[layer.index].set(x) for name, x in traces.items()}
    return group.with_tail(dataclasses.replace(slots, pos=pos, traces=new)), rows, lost


def _not_numbers(score: Float[Array, "B K S"], pos: Int[Array, "B K S"]) -> Bool[Array, "B"]:
    """Rows in which a live slot's score is not a number."""
    return (jnp.isnan(score) & (pos >= 0)).any((1, 2))


def _demoted(
    gm: GroupMethod,
    index: int | Array,
    group: GroupState,
    view: View,
    gone: Bool[Array, "B K S"],
    received: tuple[Received, ...],
) -> GroupState:
    """The group with the slots that leave its tail, at most one in every list, in its second tier."""
    (lower,) = group.bodies
    assert isinstance(lower, Slots)
    if received:
        here = grown(gm.traces, lower.layer(index).traces, received[0])
        lower = dataclasses.replace(
            lower, traces={name: x.at[index].set(here[name]) for name, x in lower.traces.items()}
        )
    which = jnp.argmax(gone, -1).astype(jnp.int32)[..., None]
    k, v, pos, *traces = (_taken(x, which) for x in (view.k, view.v, view.pos, *view.traces.values()))
    leaves = gone.any(-1, keepdims=True)
    slot = jnp.where(leaves, first_empty(lower.pos[index])[..., None], -1)
    named = dict(zip(view.traces, traces, strict=True))
    lower = write_slots(
        lower, slot[None], k[None], None if lower.v is None else v[None], pos[None],
        traces={name: x[None] for name, x in named.items()}, layer=index,
    )  # fmt: skip
    return dataclasses.replace(group, bodies=(lower,))


def _leaving(
    keep: Keep, score: Float[Array, "B K S"], pos: Int[Array, "B K S"], n: Int[Array, "B"]
) -> Bool[Array, "B K S"]:
    """The slots below a threshold, or the one of the lowest score in lists beyond their budget."""
    threshold = getattr(keep.allocate, "threshold", None)
    if threshold is not None:
        return (pos >= 0) & (score < threshold)
    # Ties keep the older token, as at the end of a prefill.
    lowest = score == score.min(-1, keepdims=True)
    newest = jnp.where(lowest & (pos >= 0), pos, -1).max(-1, keepdims=True)
    return lowest & (pos == newest) & ((pos >= 0).sum(-1) > n[:, None])[..., None]


def _in_order(score: Any, view: View, seen: Seen) -> Float[Array, "B K S"]:
    """The scores of slots in any order; a score that looks at neighbours sees them in position order."""
    if not getattr(score, "ordered", False):
        return scored(score, view, seen)
    order, back = _orders(view.pos)
    there = lambda x: _taken(x, order)  # noqa: E731
    masses = seen.observed | {name: there(x) for name, x in view.received.items()}
    mass = None if seen.mass is None else there(seen.mass)
    found = scored(score, jax.tree.map(there, view), seen._replace(observed=masses, mass=mass))
    return _taken(found, back)


def _orders(pos: Int[Array, "B K S"]) -> tuple[Int[Array, "B K S"], Int[Array, "B K S"]]:
    """Slots by position, the empty ones last, and the way back."""
    order = jnp.argsort(jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos), axis=-1, stable=True)
    return order, jnp.argsort(order, axis=-1)


def _taken(x: Array, index: Int[Array, "B K S"]) -> Array:
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 3)), axis=2)


def evict_due(
    run: Run,
    gms: tuple[GroupMethod, ...],
    groups: tuple[GroupState, ...],
    params: Params,
    length: Int[Array, "B"],
    append: Bool[Array, "B"],
) -> tuple[tuple[GroupState, ...], Bool[Array, "B"]]:
    """Brings the lists of rows that are due back to their budgets; all other rows stay as they are.

    Also the rows that were due and in which a live slot's score was not a number (NaN). One loop of one turn
    or none for all groups: XLA for GPUs copies all that a conditional passes through. It carries only what
    changes: keys and values stay where they are, unless slots merge.
    """
    mine = {i: gm for i, gm in enumerate(gms) if gm.evicting and not gm.at_once}
    lost = jnp.zeros(length.shape, bool)
    if not mine:
        return groups, lost
    tails = {i: _tail(groups[i]) for i in mine}
    due = {}
    for i, gm in mine.items():
        assert gm.keep is not None
        at = gm.keep.when.due_at(gm.keep.budget.count(length))
        held = (tails[i].pos >= 0).sum(-1, dtype=jnp.int32)
        due[i] = (held >= jnp.broadcast_to(jnp.asarray(at, jnp.int32), length.shape)[None, :, None]).any(
            (0, 2)
        )
        due[i] &= append

    def evict(_: Any, state: tuple[dict[int, Any], Array]) -> tuple[dict[int, Any], Array]:
        (changed, lost), out = state, {}
        for i, gm in mine.items():
            leaves, rows = changed[i]
            slots = dataclasses.replace(tails[i], **leaves)
            step = lambda at, s, gm=gm, i=i: _evict_layer(  # noqa: E731
                run, gm, params, s, (groups[i].rows, weights_of(gm, params["layers"][i])), at, length, due[i]
            )
            slots, rows, lost = jax.lax.fori_loop(0, slots.pos.shape[0], step, (slots, rows, lost))
            out[i] = _changing(gm, slots), rows
        return out, lost

    turns = jnp.stack(list(due.values())).any().astype(jnp.int32)
    start = {i: (_changing(gm, tails[i]), _carried_by_merge(gm, groups[i])) for i, gm in mine.items()}
    done, lost = jax.lax.fori_loop(0, turns, evict, (start, lost))
    out = {}
    for i, (leaves, rows) in done.items():
        tail = dataclasses.replace(tails[i], **leaves)
        out[i] = dataclasses.replace(groups[i], tail=tail, rows=groups[i].rows | rows)
    return tuple(out.get(i, group) for i, group in enumerate(groups)), lost


def _carried_by_merge(gm: GroupMethod, group: GroupState) -> dict[str, Any]:
    """What rows carry of a merge, which an eviction changes."""
    return {} if gm.merge is None else {repr(gm.merge): group.rows[repr(gm.merge)]}


def _tail(group: GroupState) -> Slots:
    assert group.tail is not None
    return group.tail


def _changing(gm: GroupMethod, slots: Slots) -> dict[str, Any]:
    """The arrays of slots that an eviction writes."""
    assert gm.keep is not None
    return {name: getattr(slots, name) for name in ("pos", "traces", *written(gm.keep.merge))}


def _evict_layer(
    run: Run,
    gm: GroupMethod,
    params: Params,
    state: tuple[Slots, dict[str, Any], Bool[Array, "B"]],
    held: tuple[dict[str, Any], dict[str, Array] | None],
    index: Array,
    length: Int[Array, "B"],
    due: Bool[Array, "B"],
) -> tuple[Slots, dict[str, Any], Bool[Array, "B"]]:
    """The slots with one layer brought back to its budget in the rows that are due.

    state: the slots, what rows carry of the merge, and the rows with scores that are no numbers. held: what
    else rows carry, and the matrices of the group's layers where the score asks for them.
    """
    keep, (slots, rows, lost) = gm.keep, state
    assert keep is not None and keep.score is not None
    one, n = slots.layer(index), keep.budget.count(length)
    order, back = _orders(one.pos)
    keys = one.keys()
    view: View = jax.tree.map(lambda x: _taken(x, order), View(keys.k, keys.v, one.pos, one.bias, one.traces))
    mine, weights = jax.tree.map(lambda x: x[index], held)
    observed = {repr(o): o.read(mine[repr(o)]) for o in gm.carried}
    number = gm.first + index
    seen = Seen(
        observed, None, length, n, number, run.attention_spec(gm.first), weights=weights,
        fitted=of_layer(params, number),
    )  # fmt: skip
    judging = [repr(t) for t in gm.traces if isinstance(t, Judging)]
    view = judged(gm.traces, view, seen)
    score = scored(keep.score, view, seen).astype(jnp.float32)
    lost |= _not_numbers(score, view.pos) & due
    for pattern in keep.protect:
        score = jnp.where(protected(pattern, view.pos, length, n), jnp.inf, score)
    live = view.pos >= 0
    best = top(jnp.where(live, score, -jnp.inf), jnp.broadcast_to(n[:, None], live.shape[:2]))
    kept = jnp.where(due[:, None, None], best, live)
    if keep.merge is not None:
        slot = jax.lax.broadcasted_iota(jnp.int32, live.shape, 2)
        leaving = jnp.where(live & ~kept, slot, live.shape[-1])
        now: dict[str, Any] = jax.tree.map(lambda x: x[index], rows)
        new, now = merged(keep.merge, view, kept, leaving, seen, now)
        rows = jax.tree.map(lambda x, y: x.at[index].set(y), rows, now)
        changed = _where_due(due, back, new, keys, one.bias)
        changed = {name: x for name, x in changed.items() if name in written(keep.merge)}
        slots = _replace_layer(slots, index, **changed)
    stay = _taken(kept, back)
    pos = slots.pos.at[index].set(jnp.where(stay, one.pos, -1))
    said = {
        name: jnp.where(due[:, None, None], _taken(view.traces[name], back), one.traces[name])
        for name in judging
    }
    mine = one.traces | said
    traces = {name: x.at[index].set(jnp.where(stay, mine[name], 0.0)) for name, x in slots.traces.items()}
    return dataclasses.replace(slots, pos=pos, traces=traces), rows, lost


def _where_due(
    due: Bool[Array, "B"], back: Array, new: View, keys: Keys, bias: Array | None
) -> dict[str, Array]:
    """Keys, values and biases after a merge, in the order in which they lie; in other rows as they were."""
    pairs = {"k": (new.k, keys.k), "v": (new.v, keys.v), "bias": (new.bias, bias)}
    return {
        name: jnp.where(due.reshape(-1, *(1,) * (x.ndim - 1)), _taken(x, back), old)
        for name, (x, old) in pairs.items()
        if x is not None and old is not None
    }


def _replace_layer(slots: Slots, index: int | Array, **leaves: Any) -> Slots:
    """One layer's leaves written back; merging stores encoded what the segment encodes."""

    def put(old: Any, new: Array) -> Any:
        fresh = encode(new, old.codec) if isinstance(old, Codes) else new
        return jax.tree.map(lambda x, y: x.at[index].set(y), old, fresh)

    written = {n: put(getattr(slots, n), x) for n, x in leaves.items() if getattr(slots, n) is not None}
    return dataclasses.replace(slots, **written)
