"""Evictions after all layers have run, in the rows that are due."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.selection import select
from kvjax.grammar.calls import written
from kvjax.grammar.fitted import of_layer
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Observed
from kvjax.grammar.read_kinds import EstimatingRest
from kvjax.models.layers import Params
from kvjax.models.stacking import layers_of_groups
from kvjax.state.cache import GroupState, Pages, Slots
from kvjax.steps.decoding.losing_parts import (
    as_stored,
    emptied,
    held,
    keys_of_merge,
    losing,
    tail_of,
    view_of,
)
from kvjax.steps.shared.run import Run


def evict_due(
    run: Run,
    gms: tuple[GroupMethod, ...],
    groups: tuple[GroupState, ...],
    params: Params,
    length: Int[Array, "B"],
    append: Bool[Array, "B"],
    pools: tuple[Pages, ...],
) -> tuple[tuple[GroupState, ...], Bool[Array, "B"]]:
    """Evict down to the budget in rows that are due; all other rows are unchanged.

    Also returns the rows that were due and in which a live slot's score was NaN. It is one loop with one
    iteration or none for all groups, since XLA for GPUs copies everything that passes through a conditional.
    The loop carries only what changes: keys and values are not carried, unless slots merge.
    """
    mine = {i: gm for i, gm in enumerate(gms) if gm.evicting and not gm.at_once}
    lost = jnp.zeros(length.shape, bool)
    if not mine:
        return groups, lost
    parts = {i: losing(gm, groups[i]) for i, gm in mine.items()}
    due = {i: _due(gm, parts[i], length) & append for i, gm in mine.items()}

    def evict(_: Any, state: tuple[dict[int, Any], Array]) -> tuple[dict[int, Any], Array]:
        (changed, lost), out = state, {}
        for i, gm in mine.items():
            step = partial(_evict_layer, run, gm, params, groups[i], i, length, due[i], pools)
            *out[i], lost = jax.lax.fori_loop(
                0, tail_of(groups[i]).pos.shape[0], lambda at, s, step=step: step(at, *s), (*changed[i], lost)
            )
            out[i] = tuple(out[i])
        return out, lost

    iterations = jnp.stack(list(due.values())).any().astype(jnp.int32)
    start = {i: (_changing(gm, parts[i]), _carried_by_merge(gm, groups[i])) for i, gm in mine.items()}
    done, lost = jax.lax.fori_loop(0, iterations, evict, (start, lost))
    out = list(groups)
    for i, (leaves, rows) in done.items():
        out[i] = dataclasses.replace(_with(mine[i], groups[i], leaves), rows=groups[i].rows | rows)
    return tuple(out), lost


def _due(gm: GroupMethod, parts: dict[int, Slots], length: Int[Array, "B"]) -> Bool[Array, "B"]:
    """Find the rows in which some KV head has reached the number of slots at which it evicts."""
    assert gm.keep is not None
    at = jnp.asarray(gm.keep.when.due_at(gm.keep.budget.count(length)), jnp.int32)
    return (held(parts) >= jnp.broadcast_to(at, length.shape)[None, :, None]).any((0, 2))


def _carried_by_merge(gm: GroupMethod, group: GroupState) -> dict[str, Any]:
    """Return what rows carry for a merge, which an eviction updates."""
    return {} if gm.merge is None else {key_of(gm.merge): group.rows[key_of(gm.merge)]}


def _changing(gm: GroupMethod, parts: dict[int, Slots]) -> tuple[dict[str, Any], ...]:
    """Return the arrays of slots that an eviction writes, part by part."""
    assert gm.keep is not None
    rewritten = written(gm.keep.merge)
    names = {
        "pos",
        "traces",
        *rewritten,
        *(("sums",) if rewritten or isinstance(gm.read, EstimatingRest) else ()),
    }
    names |= {"summary"} if rewritten else set()
    return tuple({name: getattr(part, name) for name in names} for part in parts.values())


def _with(gm: GroupMethod, group: GroupState, leaves: tuple[dict[str, Any], ...]) -> GroupState:
    """Put other arrays into the group's parts from which slots may be evicted."""
    pairs = zip(losing(gm, group).items(), leaves, strict=True)
    changed = {i: dataclasses.replace(part, **new) for (i, part), new in pairs}
    return group.with_parts([changed.get(i, part) for i, part in enumerate(group.parts)])


def _evict_layer(
    run: Run,
    gm: GroupMethod,
    params: Params,
    group: GroupState,
    number: int,
    length: Int[Array, "B"],
    due: Bool[Array, "B"],
    pools: tuple[Pages, ...],
    index: Array,
    leaves: tuple[dict[str, Any], ...],
    rows: dict[str, Any],
    lost: Bool[Array, "B"],
) -> tuple[tuple[dict[str, Any], ...], dict[str, Any], Bool[Array, "B"]]:
    """Return what an eviction writes to group `number`: one layer evicted to its budget in due rows.

    leaves: the same arrays before. rows: what rows carry for the merge. lost: rows with NaN scores.
    """
    keep, attention = gm.keep, run.attention_spec(gm.first)
    assert keep is not None
    group, layer = _with(gm, group, leaves), gm.number(index)
    parts = losing(gm, group)
    view = view_of(run, gm, attention.rope, group, parts, index, length, pools)
    weights = layers_of_groups(params)[number] if keep.score is not None and keep.score.weights else None
    mine, weights, now = jax.tree.map(lambda x: x[index], (group.rows, weights, rows))
    observed = {key_of(o): o.read(mine[key_of(o)]) for o in gm.carried}
    seen = Observed(
        observed, None, length, keep.budget.count(length), layer, attention, weights=weights,
        fitted=of_layer(params, layer), protect=keep.protect,
    )  # fmt: skip
    found = select(keep, gm.traces, view, seen, due, now, keys_of_merge(gm, parts, index))
    rows = jax.tree.map(lambda x, y: x.at[index].set(y), rows, found.rows)
    found = as_stored(run, gm, attention.rope, group, parts, index, view, found, length, pools)
    return _changing(gm, emptied(gm, parts, index, found)), rows, lost | found.lost
