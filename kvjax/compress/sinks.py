"""The first tokens of every row, which some stores keep unencoded beside the codes of all others."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kvjax.compress.group import GroupMethod
from kvjax.keep.select import slot_lists
from kvjax.state.cache import GroupState
from kvjax.state.write import write_slots


def write_sinks(
    gm: GroupMethod,
    group: GroupState,
    k: Float[Array, "l B K C H"],
    v: Float[Array, "l B K C V"] | None,
    pos: Int[Array, "l B K C"],
    traces: dict[str, Array],
    layer: int | Array = 0,
) -> GroupState:
    """Write new tokens that are among their rows' first ones to the slots of their positions."""
    if group.sinks is None:
        return group
    slot = jnp.where(pos < gm.sinks, pos, -1)
    sinks = write_slots(group.sinks, slot, k, v, pos, traces=traces, layer=layer)
    return dataclasses.replace(group, sinks=sinks)


def after_sinks(gm: GroupMethod, group: GroupState, pos: Int[Array, "*b"]) -> Int[Array, "*b"]:
    """Return the positions of new tokens that enter the tail, -1 for the others."""
    return pos if group.sinks is None else jnp.where(pos < gm.sinks, -1, pos)


def empty_slots(
    group: GroupState, held: Int[Array, "l B K S"], pos: Int[Array, "l B K T"]
) -> tuple[Int[Array, "l B K T"], Bool[Array, "l B K T"]]:
    """Find the empty slots of KV heads with positions `held`, in order, for new tokens; and which exist.

    If first tokens are stored separately, the first empty slot is for the first token that is none of them.
    """
    empty, free = slot_lists(held < 0, pos.shape[-1])
    if group.sinks is None:
        return empty, free
    at = jnp.maximum(jnp.cumsum(pos >= 0, axis=-1, dtype=jnp.int32) - 1, 0)
    return jnp.take_along_axis(empty, at, axis=-1), jnp.take_along_axis(free, at, axis=-1)
