"""Slots that leave behind the layers, in the rows that are due."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.select import judged
from kvjax.grammar.calls import merged, protected, scored, written
from kvjax.grammar.fitted import of_layer
from kvjax.grammar.keys import key_of
from kvjax.grammar.protocols import Judging, Seen, View
from kvjax.keep.select import top
from kvjax.models.layers import Params
from kvjax.ops.attention.union import Keys
from kvjax.state.cache import GroupState, Slots
from kvjax.steps.decoding.evict_now import not_numbers, orders, replace_layer, tail_of, taken
from kvjax.steps.decoding.update_traces import weights_of
from kvjax.steps.shared.rotate import turn_of_one, turned_keys
from kvjax.steps.shared.run import Run


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
    tails = {i: tail_of(groups[i]) for i in mine}
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
    return {} if gm.merge is None else {key_of(gm.merge): group.rows[key_of(gm.merge)]}


def _changing(gm: GroupMethod, slots: Slots) -> dict[str, Any]:
    """The arrays of slots that an eviction writes."""
    assert gm.keep is not None
    return {name: getattr(slots, name) for name in {"pos", "traces", *written(gm.keep.merge)}}


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
    order, back = orders(one.pos)
    keys, attention = one.keys(), run.attention_spec(gm.first)
    keys = turned_keys(attention.rope, keys, turn_of_one(run, length - 1, [one.pos]), 0, length)
    view: View = jax.tree.map(lambda x: taken(x, order), View(keys.k, keys.v, one.pos, one.bias, one.traces))
    mine, weights = jax.tree.map(lambda x: x[index], held)
    observed = {key_of(o): o.read(mine[key_of(o)]) for o in gm.carried}
    number = gm.first + index
    seen = Seen(
        observed, None, length, n, number, attention, weights=weights,
        fitted=of_layer(params, number), protect=keep.protect,
    )  # fmt: skip
    judging = [key_of(t) for t in gm.traces if isinstance(t, Judging)]
    said_of = list(one.traces) if "traces" in written(keep.merge) else judging
    view = judged(gm.traces, view, seen)
    score = scored(keep.score, view, seen).astype(jnp.float32)
    lost |= not_numbers(score, view.pos) & due
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
        slots, view = replace_layer(slots, index, **changed), view._replace(traces=new.traces)
    stay = taken(kept, back)
    pos = slots.pos.at[index].set(jnp.where(stay, one.pos, -1))
    said = {
        name: jnp.where(due[:, None, None], taken(view.traces[name], back), one.traces[name])
        for name in said_of
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
        name: jnp.where(due.reshape(-1, *(1,) * (x.ndim - 1)), taken(x, back), old)
        for name, (x, old) in pairs.items()
        if x is not None and old is not None
    }
