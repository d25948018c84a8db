"""The slot that leaves in the step of a new token, inside its layer or behind those that share it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.select import grown
from kvjax.grammar import Keep
from kvjax.grammar.calls import merged, protected, scored, written
from kvjax.grammar.keys import key_of
from kvjax.grammar.protocols import Inputs, Seen, View
from kvjax.keep.observations.observe import Mass, Queries
from kvjax.models.exchange import published
from kvjax.models.mixer import Layer
from kvjax.models.mixers.attention import mixer_of
from kvjax.state.cache import GroupState, Slots
from kvjax.state.codes import Codes
from kvjax.state.write import first_empty, write_slots
from kvjax.steps.decoding.attend import Received
from kvjax.steps.decoding.update_traces import received_in_all
from kvjax.steps.shared.rotate import turned_keys, turns_over
from kvjax.steps.shared.run import Run

NEWEST = key_of(Queries(1))


class Now(NamedTuple):
    """What decides which slot leaves in a token's own step: what slots received, its query, carried rows."""

    received: tuple[Received, ...]
    q: Float[Array, "B N 1 H"]
    rows: dict[str, Any]
    length: Int[Array, "B"]
    append: Bool[Array, "B"]
    weights: dict[str, Array] | None = None
    fitted: dict[str, dict[str, Array]] = {}  # noqa: RUF012 (never written to)


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
        received = received_in_all(run, gms, seen, i)
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
    slots, received = tail_of(group), now.received[-1] if now.received else {}
    one, n = slots.layer(layer.index), keep.budget.count(length)
    stored, turn = one.keys(), turns_over(run, length - 1, group.parts, layer.index)[0]
    keys = turned_keys(layer.rope, stored, turn, len(group.parts) - 1, length)
    traces = grown(gm.traces, one.traces, received)
    view = View(keys.k, keys.v, one.pos, one.bias, traces, received)
    observed = {key_of(o): o.read(now.rows[key_of(o)]) for o in gm.carried} | {
        NEWEST: (q, length[:, None] - 1)
    }
    mass = received.get(key_of(Mass("sum")))
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
        keep.protect,
    )
    score = _in_order(keep.score, view, seen).astype(jnp.float32)
    lost = not_numbers(score, one.pos) & append
    for pattern in keep.protect:
        score = jnp.where(protected(pattern, one.pos, length, n), jnp.inf, score)
    score = jnp.where(one.pos < 0, jnp.inf, score)
    gone = _leaving(keep, score, one.pos, n) & append[:, None, None]
    rows: dict[str, Any] = {}
    if keep.merge is not None:
        victim = jnp.where(gone.any(-1), jnp.argmax(gone, -1), one.capacity).astype(jnp.int32)
        stay = (one.pos >= 0) & ~gone
        new, rows = merged(keep.merge, view, stay, victim[..., None], seen, now.rows)
        traces = new.traces
        changed = {name: getattr(new, name) for name in written(keep.merge) if name != "traces"}
        slots = replace_layer(slots, layer.index, **changed)
    if keep.lower is not None:
        group = _demoted(gm, layer.index, group, view._replace(k=stored.k), gone, now.received)
    traces = {name: jnp.where(gone, 0.0, x) for name, x in traces.items()}
    pos = slots.pos.at[layer.index].set(jnp.where(gone, -1, one.pos))
    new = {name: slots.traces[name].at[layer.index].set(x) for name, x in traces.items()}
    return group.with_tail(dataclasses.replace(slots, pos=pos, traces=new)), rows, lost


def evict_hidden(
    run: Run, gm: GroupMethod, layer: Layer, group: GroupState, inputs: Inputs, append: Bool[Array, "B"]
) -> GroupState:
    """Empties the slots that a token hides, from itself too: before it attends."""
    assert gm.hiding is not None
    one = tail_of(group).layer(layer.index)
    since = {key_of(gm.hiding): gm.hiding.since(inputs, one.traces, one.pos)}
    now = Now((since,), inputs.q, {}, inputs.length, append, None, inputs.fitted)
    return evict_one(run, gm, layer, group, now)[0]


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
    k, v, pos, *traces = (taken(x, which) for x in (view.k, view.v, view.pos, *view.traces.values()))
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
    """The slots below a threshold, or the one of the lowest score in lists beyond their budget.

    Where slots merge, the first of those below a threshold: the others are merged behind later tokens.
    """
    threshold = getattr(keep.allocate, "threshold", None)
    if threshold is not None:
        below = (pos >= 0) & (score < threshold)
        return below if keep.merge is None else below & (jnp.cumsum(below, -1) == 1)
    # Ties keep the older token, as at the end of a prefill.
    lowest = score == score.min(-1, keepdims=True)
    newest = jnp.where(lowest & (pos >= 0), pos, -1).max(-1, keepdims=True)
    return lowest & (pos == newest) & ((pos >= 0).sum(-1) > n[:, None])[..., None]


def _in_order(score: Any, view: View, seen: Seen) -> Float[Array, "B K S"]:
    """The scores of slots in any order; a score that looks at neighbours sees them in position order."""
    if not getattr(score, "ordered", False):
        return scored(score, view, seen)
    order, back = orders(view.pos)
    there = lambda x: taken(x, order)  # noqa: E731
    masses = seen.observed | {name: there(x) for name, x in view.received.items()}
    mass = None if seen.mass is None else there(seen.mass)
    found = scored(score, jax.tree.map(there, view), seen._replace(observed=masses, mass=mass))
    return taken(found, back)


def not_numbers(score: Float[Array, "B K S"], pos: Int[Array, "B K S"]) -> Bool[Array, "B"]:
    """Rows in which a live slot's score is not a number."""
    return (jnp.isnan(score) & (pos >= 0)).any((1, 2))


def orders(pos: Int[Array, "B K S"]) -> tuple[Int[Array, "B K S"], Int[Array, "B K S"]]:
    """Slots by position, the empty ones last, and the way back."""
    order = jnp.argsort(jnp.where(pos < 0, jnp.iinfo(jnp.int32).max, pos), axis=-1, stable=True)
    return order, jnp.argsort(order, axis=-1)


def taken(x: Array, index: Int[Array, "B K S"]) -> Array:
    """x of the slots at `index`, list by list."""
    return jnp.take_along_axis(x, index.reshape(*index.shape, *(1,) * (x.ndim - 3)), axis=2)


def tail_of(group: GroupState) -> Slots:
    """The slots that new tokens go to."""
    assert group.tail is not None
    return group.tail


def replace_layer(slots: Slots, index: int | Array, **leaves: Any) -> Slots:
    """One layer's leaves written back; merging stores encoded what the segment encodes."""

    def put(old: Any, new: Array) -> Any:
        if not isinstance(old, Codes):
            return old.at[index].set(new)
        fresh = old.encoded(new, index)
        return dataclasses.replace(old, data={n: x.at[index].set(fresh[n]) for n, x in old.data.items()})

    written = {n: put(getattr(slots, n), x) for n, x in leaves.items() if getattr(slots, n) is not None}
    return dataclasses.replace(slots, **written)
