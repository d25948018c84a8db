"""The eviction in the step of a new token, inside its layer or after the layers that share its slots."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.compress.selection import NEWEST, RECEIVED, grown, select, taken
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs, Observed, View
from kvjax.models.exchange import published
from kvjax.models.mixer import Layer
from kvjax.models.mixers.attention import mixer_of
from kvjax.state.cache import GroupState, Pages, Slots
from kvjax.state.write import first_empty, write_slots
from kvjax.steps.decoding.at_layer import Received
from kvjax.steps.decoding.losing_parts import (
    as_stored,
    emptied,
    keys_of_merge,
    losing,
    tail_of,
    view_of,
)
from kvjax.steps.decoding.update_traces import received_in_all
from kvjax.steps.shared.run import Run


class EvictionInputs(NamedTuple):
    """What decides which slot a token's own step evicts: received attention, the query, carried rows."""

    received: tuple[Received, ...]
    q: Float[Array, "B N 1 H"]
    rows: dict[str, Any]
    length: Int[Array, "B"]
    append: Bool[Array, "B"]
    pools: tuple[Pages, ...]
    weights: dict[str, Array] | None = None
    fitted: dict[str, dict[str, Array]] = {}  # noqa: RUF012 (never written to)


def evict_shared(
    run: Run,
    gms: tuple[GroupMethod, ...],
    groups: tuple[GroupState, ...],
    seen: tuple[Any, ...],
    length: Int[Array, "B"],
    append: Bool[Array, "B"],
    pools: tuple[Pages, ...],
) -> tuple[tuple[GroupState, ...], Bool[Array, "B"]]:
    """Evict from slots that several layers read, after the last reader, by attention summed over readers.

    Also returns the rows in which a live slot's score was NaN.
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
        changed, rows, bad = evict_one(
            run, gm, layer, groups[i], EvictionInputs(mine, q, rows, length, append, pools)
        )
        rows = groups[i].rows | jax.tree.map(lambda x: x[None], rows)
        out[i], lost = dataclasses.replace(changed, rows=rows), lost | bad
    return tuple(out), lost


def evict_one(
    run: Run, gm: GroupMethod, layer: Layer, group: GroupState, now: EvictionInputs
) -> tuple[GroupState, dict[str, Any], Bool[Array, "B"]]:
    """Evict the slot with the lowest score from each KV head that holds more than its budget.

    The slot is merged into others, or moved to the second tier, if the keep says so. Also returns the carried
    values of rows that an eviction updates, and the rows in which a live slot's score was NaN, which cannot
    be ranked.
    """
    keep, length, append = gm.keep, now.length, now.append
    assert keep is not None
    parts = losing(gm, group)
    view = view_of(run, gm, layer.rope, group, parts, layer.index, length, now.pools, now.received)
    observed = {key_of(o): o.read(now.rows[key_of(o)]) for o in gm.carried}
    observed |= {NEWEST: (now.q, length[:, None] - 1)} | view.received
    seen = Observed(
        observed,
        view.received.get(RECEIVED),
        length,
        keep.budget.count(length),
        layer.number,
        run.attention_spec(gm.first),
        now.q,
        now.weights,
        now.fitted,
        keep.protect,
    )
    stored = None if keep.merge is None else keys_of_merge(gm, parts, layer.index)
    found = select(keep, gm.traces, view, seen, append, now.rows, stored)
    if keep.merge is not None:
        found = as_stored(run, gm, layer.rope, group, parts, layer.index, view, found, length, now.pools)
    left = emptied(gm, parts, layer.index, found)
    new = group.with_parts([left.get(i, part) for i, part in enumerate(group.parts)])
    if keep.lower is not None:
        new = _demoted(
            gm, layer.index, new, tail_of(group).layer(layer.index), view, found.gone, now.received
        )
    return new, found.rows, found.lost


def evict_hidden(
    run: Run, gm: GroupMethod, layer: Layer, group: GroupState, inputs: Inputs, append: Bool[Array, "B"],
    pools: tuple[Pages, ...],
) -> GroupState:  # fmt: skip
    """Evict the slots that a token hides from itself and from later tokens, before it attends."""
    assert gm.hiding is not None
    layers = [part.layer(layer.index) for part in losing(gm, group).values()]
    since = tuple({key_of(gm.hiding): gm.hiding.since(inputs, one.traces, one.pos)} for one in layers)
    now = EvictionInputs(since, inputs.q, {}, inputs.length, append, pools, None, inputs.fitted)
    return evict_one(run, gm, layer, group, now)[0]


def _demoted(
    gm: GroupMethod,
    index: int | Array,
    group: GroupState,
    stored: Slots,
    view: View,
    gone: Bool[Array, "B K S"],
    received: tuple[Received, ...],
) -> GroupState:
    """Move the slots evicted from a group's tail, at most one per KV head, to its second tier.

    stored: the layer's tail with the keys as stored. view: the same slots as words see them.
    """
    (lower,) = group.bodies
    assert isinstance(lower, Slots)
    if received:
        here = grown(gm.traces, lower.layer(index).traces, received[0])
        lower = dataclasses.replace(
            lower, traces={name: x.at[index].set(here[name]) for name, x in lower.traces.items()}
        )
    which = jnp.argmax(gone, -1).astype(jnp.int32)[..., None]
    k, v, pos, *traces = (taken(x, which) for x in (stored.keys().k, view.v, view.pos, *view.traces.values()))
    leaves = gone.any(-1, keepdims=True)
    slot = jnp.where(leaves, first_empty(lower.pos[index])[..., None], -1)
    named = dict(zip(view.traces, traces, strict=True))
    lower = write_slots(
        lower, slot[None], k[None], None if lower.v is None else v[None], pos[None],
        traces={name: x[None] for name, x in named.items()}, layer=index,
    )  # fmt: skip
    return dataclasses.replace(group, bodies=(lower,))
