"""Updates of traces and carried rows after a decode step."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from kvjax.compress.group import GroupMethod
from kvjax.compress.segments import remember_in_pages
from kvjax.compress.selection import grown
from kvjax.grammar.keys import key_of
from kvjax.grammar.kinds import Inputs
from kvjax.models.mixer import Layer
from kvjax.models.mixers.attention import mixer_of
from kvjax.state.cache import GroupState, Pages, Slots
from kvjax.steps.decoding.at_layer import Received
from kvjax.steps.shared.run import Run


class LayerRecords(NamedTuple):
    """What a layer records for the end of the step.

    received: what the slots of each part received from the query. q: the rotated query, if several layers
    read the slots. rows: what rows carry after this token.
    """

    received: tuple[Received, ...]
    q: Float[Array, "B N 1 H"] | None
    rows: dict[str, Any]


def carried(gm: GroupMethod, layer: Layer, state: GroupState, inputs: Inputs) -> dict[str, Any]:
    """Compute what the rows of a layer carry after a token."""
    mine = jax.tree.map(lambda x: x[layer.index], state.rows)
    by_merge = {key_of(gm.merge): mine[key_of(gm.merge)]} if gm.merge is not None and gm.at_once else {}
    return by_merge | {key_of(o): o.carry(mine[key_of(o)], inputs) for o in gm.carried}


def remember(
    run: Run,
    gms: tuple[GroupMethod, ...],
    groups: tuple[GroupState, ...],
    pools: tuple[Pages, ...],
    seen: tuple[Any, ...],
) -> tuple[tuple[GroupState, ...], tuple[Pages, ...]]:
    """Traces and carried rows of all groups after a token; layers that evict at once have theirs already."""
    out = list(groups)
    for i, (gm, asked) in enumerate(zip(gms, seen, strict=True)):
        if not isinstance(asked, LayerRecords) or gm.kind != "slots":
            continue
        group = dataclasses.replace(groups[i], rows=groups[i].rows | asked.rows)
        if asked.received and gm.traces and not gm.at_once:
            received = received_in_all(run, gms, seen, i)
            pools = remember_in_pages(gm, group, pools, received)
            parts = [
                dataclasses.replace(s, traces=grown(gm.traces, s.traces, got)) if isinstance(s, Slots) else s
                for s, got in zip(group.parts, received, strict=True)
            ]
            group = group.with_parts(parts)
        out[i] = group
    return tuple(out), pools


def received_in_all(
    run: Run, gms: tuple[GroupMethod, ...], seen: tuple[Any, ...], i: int
) -> tuple[Received, ...]:
    """Sum what the slots of group `i` received in its own layers and in those that read them."""
    gm, received = gms[i], seen[i].received
    for j, reader in enumerate(gms):
        if reader.kind == "reads" and mixer_of(run.config, reader.first).source_of("slots") == gm.first:
            pairs = zip(received, seen[j].received, strict=True)
            received = tuple(
                mine
                | {
                    key_of(o): o.join(mine[key_of(o)], o.reduction.over(theirs[key_of(o)], 0)[None])
                    for o in gm.masses
                }
                for mine, theirs in pairs
            )
    return received
